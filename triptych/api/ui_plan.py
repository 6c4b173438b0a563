"""What ``/ui`` shows of a planned prompt, before it is sent."""

from triptych.observe.pipeline import ItemPreview, PromptPlan
from triptych.prompt.prompt import PlannedItem, PlannedPrompt
from triptych.types import AudioHeader, ItemPlan, VideoHeader


def prompt_plan(prompt: PlannedPrompt) -> PromptPlan:
    """Return the plan's sizes and costs, without content."""
    return PromptPlan(len(prompt.tokens), [_item(item) for item in prompt.items])


def _item(item: PlannedItem) -> ItemPreview:
    plan = item.plan
    return ItemPreview(plan.modality, _size(plan), _parts(plan), plan.rows, plan.cost)


def _size(plan: ItemPlan) -> str:
    header = plan.header
    if isinstance(header, AudioHeader):
        return f"{header.seconds:.1f} s"
    given, resized = (header.width, header.height), (plan.resized_width, plan.resized_height)
    sizes = [f"{width} × {height}" for width, height in dict.fromkeys((given, resized))]
    seconds = f"{header.seconds:.1f} s, " if isinstance(header, VideoHeader) else ""
    return seconds + " → ".join(sizes)


def _parts(plan: ItemPlan) -> str:
    if isinstance(plan.header, VideoHeader):
        return f"{plan.grid[0]} step{'s' * (plan.grid[0] > 1)} in time"
    return f"{plan.num_parts} {'tiles' if plan.modality == 'image' else 'parts'}" if plan.num_parts > 1 else ""
