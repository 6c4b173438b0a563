"""What ``/ui`` shows of a planned prompt, before it is sent."""

from triptych.models.base import Planner
from triptych.observe.pipeline import ItemPreview, PromptPlan
from triptych.prompt.prompt import PlannedPrompt
from triptych.types import AudioHeader, ItemPlan, VideoHeader


def prompt_plan(prompt: PlannedPrompt, planner: Planner) -> PromptPlan:
    """Return the plan's sizes and costs, without content; items in the request's order. ``planner`` is the model's."""
    items = sorted(prompt.items, key=lambda item: item.number)
    return PromptPlan(len(prompt.tokens), [_item(item.plan, planner) for item in items])


def _item(plan: ItemPlan, planner: Planner) -> ItemPreview:
    return ItemPreview(plan.modality, _size(plan), _parts(plan, planner), plan.rows, plan.cost)


def _size(plan: ItemPlan) -> str:
    header = plan.header
    if isinstance(header, AudioHeader):
        return f"{header.seconds:.1f} s"
    given, resized = (header.width, header.height), (plan.resized_width, plan.resized_height)
    sizes = [f"{width} × {height}" for width, height in dict.fromkeys((given, resized))]
    seconds = f"{header.seconds:.1f} s, " if isinstance(header, VideoHeader) else ""
    return seconds + " → ".join(sizes)


def _parts(plan: ItemPlan, planner: Planner) -> str:
    if isinstance(plan.header, VideoHeader):
        frames, steps = planner.num_frames(plan), plan.grid[0]
        together = "" if frames == steps else f", {steps} step{'s' * (steps > 1)} in time"
        return f"{frames} frame{'s' * (frames > 1)}{together}"
    return f"{plan.num_parts} {'tiles' if plan.modality == 'image' else 'parts'}" if plan.num_parts > 1 else ""
