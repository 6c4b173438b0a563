"""Trains the demo model: `python -m demo.train`."""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3VLForConditionalGeneration

from demo.batches import Batch, Row, RowMaker, collate
from demo.chat import END_OF_TEXT, special, train_tokenizer, user_turn
from demo.checkpoint import model_config, save
from demo.questions import TRAINING_SEEDS, VALIDATION_SEEDS, Lesson, arrange, make_example, make_quiz
from demo.tower import train_tower
from triptych.demo import MODEL_DIR

ROWS = 16
# Rows are generated in pools and sorted by length, so that batches contain little padding.
POOL = 4 * ROWS
MUON_RATE = 3e-3
ADAMW_RATE = 1.5e-3
WARM_UP = 0.03
# The share of the time in which the tower is trained by itself, before the questions begin.
TOWER_ONLY = 0.16
TOWER_ONLY_RATE = 0.6
# The share of the time after which the tower is trained together with the decoder, at a lower rate.
TOWER_JOINS = 0.4
TOWER_RATE = 0.4
# The factor of the learning rates when training resumes from a checkpoint.
RESUMED_RATE = 0.5
VALIDATED = 144


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description="Train the bundled demo model on pictures drawn for it.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="the folder to write (%(default)s)")
    parser.add_argument("--minutes", type=float, default=42, help="how long to train (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="processor cores to use (%(default)s)")
    parser.add_argument("--resume", type=Path, help="continue with this checkpoint's weights, in the last lesson")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and training pictures (%(default)s)")
    options = parser.parse_args()
    if options.seed not in TRAINING_SEEDS:
        parser.error(f"--seed must be at least 0 and below {TRAINING_SEEDS.stop}: the others are for evaluation")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.resume:
        tokenizer = Tokenizer.from_file(str(options.resume / "tokenizer.json"))
        model = Qwen3VLForConditionalGeneration.from_pretrained(options.resume, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(_corpus(Random(options.seed)))
        model = Qwen3VLForConditionalGeneration(model_config(tokenizer))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {tokenizer.get_vocab_size()} tokens")
    train(model, tokenizer, options.minutes * 60, options.seed, options.out, resumed=options.resume is not None)
    save(model, tokenizer, options.out)


def train(
    model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, seconds: float, seed: int, out: Path, *, resumed: bool
) -> None:
    """Train for `seconds`, by which the learning rate is scheduled, and write the checkpoint with each report."""
    maker, padding = RowMaker(tokenizer), special(tokenizer, END_OF_TEXT)
    held_out = [maker.example(make_example(number)) for number in VALIDATION_SEEDS[:VALIDATED]]
    validation = [collate(held_out[start : start + ROWS], padding) for start in range(0, VALIDATED, ROWS)]
    model.model.visual.patch_embed.forward = lambda pixels: _embed_patches(model, pixels)
    optimizers = make_optimizers(model)
    curriculum = Curriculum(len(Curriculum.LESSONS) - 1 if resumed else 0)
    if not resumed:
        _set_rates(optimizers, TOWER_ONLY_RATE, TOWER_ONLY_RATE)
        train_tower(model, optimizers, Random(f"sight {seed}"), TOWER_ONLY * seconds)
        seconds *= 1 - TOWER_ONLY
        model.model.visual.requires_grad_(False)  # gradients of an untrained decoder would only degrade it
    start = reported = time.monotonic()
    num_rows, losses = 0, []
    for step, rows in enumerate(_training_rows(maker, seed, curriculum)):
        done = (time.monotonic() - start) / seconds
        if done >= 1:
            break
        if done > TOWER_JOINS or curriculum.level > 2:
            model.model.visual.requires_grad_(True)
        share = rate(done) * (RESUMED_RATE if resumed else 1.0)
        _set_rates(optimizers, share, TOWER_RATE * share)
        loss, right = score(model, collate(rows, padding))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        curriculum.observe(right.float().mean().item(), done)
        num_rows += len(rows)
        losses.append(loss.item())
        if time.monotonic() - reported > 120:
            reported = time.monotonic()
            exact = accuracy(model, validation)
            print(
                f"{(reported - start) / 60:5.1f} min  step {step + 1}  {num_rows} rows  "
                f"level {curriculum.level}  loss {sum(losses) / len(losses):.4f}  validation {exact:.1%}",
                flush=True,
            )
            losses = []
            save(model, tokenizer, out)
    print(
        f"trained for {(time.monotonic() - start) / 60:.1f} min, validation {accuracy(model, validation):.1%}",
        flush=True,
    )


def make_optimizers(model: Qwen3VLForConditionalGeneration) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, which converge in fewer steps with it, and AdamW for everything else.

    Each has one parameter group for the decoder and one for the tower.
    """
    # The mergers' matrices are so large that Muon would spend more time on them than on all others.
    named = dict(model.named_parameters())
    matrices = {name for name, p in named.items() if p.ndim == 2 and "embed" not in name and "merger" not in name}

    def groups(names: set[str], peak: float) -> list[dict[str, Any]]:
        tower = {name for name in names if ".visual." in name}
        halves = (("language", names - tower), ("tower", tower))
        return [{"params": [named[n] for n in sorted(half)], "peak": peak, "half": title} for title, half in halves]

    return [
        torch.optim.Muon(groups(matrices, MUON_RATE), lr=MUON_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            groups(set(named) - matrices, ADAMW_RATE), lr=ADAMW_RATE, weight_decay=0.0, betas=(0.9, 0.98)
        ),
    ]


def _set_rates(optimizers: list[torch.optim.Optimizer], language: float, tower: float) -> None:
    """Set the learning rates, as fractions of their peaks."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * (tower if group["half"] == "tower" else language)


def rate(done: float) -> float:
    """Return the learning rate, as a fraction of its peak, after the fraction `done` of the time."""
    return min(1.0, done / WARM_UP) * (0.01 + 0.99 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


def score(model: Qwen3VLForConditionalGeneration, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss over answer tokens, and which rows have all of them right ([rows] bool)."""
    features = model.model.visual(batch.patches, grid_thw=batch.grids)
    pictures = batch.ids == model.config.image_token_id
    embedded = model.model.language_model.embed_tokens(batch.ids)
    hidden = model.model.language_model(
        inputs_embeds=embedded.masked_scatter(pictures[..., None], features.pooler_output),
        position_ids=batch.positions,
        attention_mask=batch.visible,
        visual_pos_masks=pictures,
        deepstack_visual_embeds=features.deepstack_features,
        use_cache=False,
    ).last_hidden_state
    before = batch.scored.roll(-1, dims=1)  # the token that stands before an answer's token predicts it
    logits = model.lm_head(hidden[before])
    wanted = batch.ids[batch.scored]
    wrong = torch.zeros(batch.ids.shape[0], dtype=torch.bool)
    rows = batch.scored.nonzero()[:, 0]
    wrong[rows[logits.argmax(-1) != wanted]] = True
    return torch.nn.functional.cross_entropy(logits, wanted), ~wrong


def _embed_patches(model: Qwen3VLForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """Compute the tower's convolution as one matrix product, whose backward pass is much faster on CPUs."""
    convolution = model.model.visual.patch_embed.proj
    return torch.nn.functional.linear(pixels, convolution.weight.flatten(1), convolution.bias)


@torch.no_grad()
def accuracy(model: Qwen3VLForConditionalGeneration, batches: list[Batch]) -> float:
    """Return the share of questions answered exactly right; greedy generation would give the same answers."""
    right = torch.cat([score(model, batch)[1] for batch in batches])
    return right.float().mean().item()


class Curriculum:
    """Lessons from a single shape or digit to two pictures.

    The next lesson begins once the current one is mastered; the last one at a third of the time at the latest.
    """

    LESSONS = (
        Lesson(most_things=1, most_digits=1, pairs=0.0, described=0.5),
        Lesson(most_things=2, most_digits=2, pairs=0.0, described=0.5),
        Lesson(most_things=3, most_digits=3, pairs=0.0, described=0.5),
        Lesson(pairs=0.3, described=0.4),
        Lesson(pairs=0.5, described=0.3, hard=0.4),
    )
    MASTERED = 0.6
    """Recent share of rows with all answers right, above which the next lesson begins."""

    def __init__(self, level: int) -> None:
        self.level = level
        self._recent_share = 0.0

    @property
    def lesson(self) -> Lesson:
        return self.LESSONS[self.level]

    def observe(self, right: float, done: float) -> None:
        """Update the recent share of rows answered right, after the fraction `done` of the time."""
        self._recent_share += 0.03 * (right - self._recent_share)
        due = min(len(self.LESSONS) - 1, int(done * 3 * len(self.LESSONS)))
        if self.level < len(self.LESSONS) - 1 and (self._recent_share > self.MASTERED or self.level < due):
            self.level += 1
            self._recent_share = 0.0


def _training_rows(maker: RowMaker, seed: int, curriculum: Curriculum) -> Iterator[list[Row]]:
    rng = Random(seed)
    while True:
        pool = [maker.quiz(make_quiz(rng, rng.randint(2, 6), curriculum.lesson), rng) for _ in range(POOL)]
        pool.sort(key=lambda row: len(row.ids))
        batches = [pool[start : start + ROWS] for start in range(0, POOL, ROWS)]
        rng.shuffle(batches)
        yield from batches


def _corpus(rng: Random) -> Iterator[str]:
    for _ in range(2000):
        quiz = make_quiz(rng, 6)
        for asked in quiz.asked:
            yield user_turn(arrange(len(quiz.pictures), asked.question, rng))
            yield asked.answer


if __name__ == "__main__":
    main()
