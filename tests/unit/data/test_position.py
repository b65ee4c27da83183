"""Positions in the data. After any change, each sample of a stream is used once and in order, and samples that are left
out are recorded.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import replace

import pytest
from pydantic import ValidationError

from frontier_llm.data.position import START, SYNTHETIC, Position, Source, Wanted, order_key

DATASETS = [f"{number:064x}" for number in range(5)]


def source(number: int, weight: float = 1.0, path: str = "") -> Source:
    return Source(DATASETS[number], path or f"data/{number}", 1000 * (number + 1), weight)


def blend(*sources: Source, length: int = 8, packing: str = "concatenate", seed: int = 1) -> Wanted:
    return Wanted(sources, length, packing, seed)  # type: ignore[arg-type]


class Model:
    """Reference model that counts the samples used one by one."""

    def __init__(self) -> None:
        self.position = START
        # by order key: indices in the order of training
        self.read: dict[str, list[int]] = defaultdict(list)
        self.skipped: dict[str, set[int]] = defaultdict(set)
        self.tokens = self.steps = self.samples = 0

    def deal(self, samples: int, trained: bool) -> None:
        """Use the next samples one by one, by random access from the current position."""
        for offset in range(samples):
            place, index = self.position.sample(offset)
            stream = self.position.current[place]
            if trained:
                self.read[stream.order].append(index)
                self.tokens += stream.sequence_length
            else:
                self.skipped[stream.order].add(index)
        self.samples += samples

    def train(self, batch: int, steps: int) -> None:
        self.deal(batch * steps, trained=True)
        one_by_one = self.position
        for _ in range(steps):
            one_by_one = one_by_one.advance(batch)
        self.position = self.position.advance(batch, steps)
        assert one_by_one == self.position
        self.steps += steps

    def leave_out(self, samples: int) -> None:
        self.deal(samples, trained=False)
        self.position = self.position.leave_out(samples)

    def returned_to(self, earlier: Model) -> None:
        """Return to `earlier`, and leave out what has been read since."""
        for order, read in self.read.items():
            self.skipped[order] |= set(read) - set(earlier.read[order])
        self.position = self.position.returned_to(earlier.position)
        self.read = earlier.read
        self.tokens = earlier.tokens
        self.steps = earlier.steps

    def check(self) -> None:
        position = self.position
        assert list(position.faults(self.steps, self.samples, self.tokens)) == []
        assert Position.model_validate_json(position.model_dump_json()) == position
        for stream in position.streams:
            read = self.read[stream.order]
            skipped = self.skipped[stream.order]
            assert read == sorted(set(read)) and not skipped & set(read)
            assert set(read) | skipped == set(range(stream.taken))
            ranges = [range(first, first + count) for first, count in stream.left_out]
            assert {index for one in ranges for index in one} == skipped
            assert stream.tokens_read == len(read) * stream.sequence_length
        for dataset in DATASETS:
            lengths = [
                len(self.read[stream.order]) * stream.sequence_length
                for stream in position.streams
                if stream.dataset == dataset
            ]
            assert position.tokens_of(dataset) == sum(lengths)


def any_blend(rng: random.Random) -> Wanted:
    numbers = [rng.randrange(len(DATASETS)) for _ in range(rng.randint(1, 4))]  # a dataset may occur twice
    weights = [rng.choice([1, 1, 2, 3, 0.5, 0.25, 0.1, 7]) for _ in numbers]
    members = [
        source(number, weight, rng.choice(["", f"moved/{number}"]))
        for number, weight in zip(numbers, weights, strict=True)
    ]
    if rng.random() < 0.1:
        members = [Source(SYNTHETIC, SYNTHETIC, 0, 1.0)]
    return blend(*members, length=rng.choice([8, 16]), packing=rng.choice(["concatenate", "best-fit"]))


@pytest.mark.parametrize("seed", range(300))
def test_any_changes_read_each_sample_of_a_stream_once(seed: int) -> None:
    rng = random.Random(seed)
    model = Model()
    saved: list[tuple[Position, Model]] = []
    model.position = model.position.enter(any_blend(rng))
    for _ in range(rng.randint(2, 12)):
        action = rng.randrange(7)
        if action <= 1:
            model.position = model.position.enter(any_blend(rng))
        elif action == 2:
            model.leave_out(rng.randint(1, 9))
        elif action == 3:
            kept = Model()
            kept.__dict__ |= {
                "position": model.position,
                "tokens": model.tokens,
                "steps": model.steps,
                "samples": model.samples,
                "read": defaultdict(list, {key: list(value) for key, value in model.read.items()}),
                "skipped": defaultdict(set, {key: set(value) for key, value in model.skipped.items()}),
            }
            saved.append((model.position, kept))
        elif action == 4 and saved:  # a kill or a rewind returns to a saved position
            earlier = saved.pop()[1]
            if rng.random() < 0.5:
                model.returned_to(earlier)
            else:
                model = earlier
        elif action == 5 and model.samples:
            model.position = model.position.restart(rng.choice(model.position.current).dataset).enter(any_blend(rng))
        else:
            model.train(rng.randint(1, 6), rng.randint(1, 5))
        if model.samples:
            model.check()


def test_the_first_blend_has_the_orders_of_its_places() -> None:
    for packing in ("concatenate", "best-fit"):
        position = START.enter(blend(source(2), source(0), source(2), packing=packing, seed=9))
        assert [stream.key for stream in position.current] == [order_key(packing, 9, place) for place in range(3)]  # type: ignore[arg-type]
    assert START.enter(blend(Source(SYNTHETIC, SYNTHETIC, 0, 1.0), seed=9)).streams[0].key == order_key(
        "synthetic",
        9,
        0,
    )


def test_equal_proportions_and_moved_files_are_one_blend() -> None:
    begun = START.enter(blend(source(0), source(1))).advance(3)
    for same in (
        blend(source(0, 0.5), source(1, 0.5)),
        blend(source(1, 2), source(0, 2)),
        blend(source(0), source(1), seed=2),
    ):
        assert begun.enter(same) == begun
    moved = begun.enter(blend(source(0, path="elsewhere"), source(1)))
    assert moved.streams[0].path == "elsewhere" and moved.dealt == 3 and moved.sample(0) == begun.sample(0)
    assert begun.enter(blend(source(0, 2), source(1))).dealt == 0


def test_a_source_in_front_changes_nothing_for_the_others() -> None:
    begun = START.enter(blend(source(0), source(1))).advance(8)
    more = begun.enter(blend(source(3), source(0), source(1)))
    assert [stream.dataset for stream in more.streams] == DATASETS[:2] + DATASETS[3:4]
    assert more.streams[:2] == begun.streams
    dealt = [more.sample(offset) for offset in range(6)]
    assert sorted(dealt) == [(0, 4), (0, 5), (1, 4), (1, 5), (2, 0), (2, 1)]


def test_two_mentions_of_one_dataset_have_two_counts() -> None:
    twice = START.enter(blend(source(0), source(0, 3))).advance(8)
    assert [stream.taken for stream in twice.streams] == [2, 6] and twice.streams[0].order != twice.streams[1].order
    once = twice.enter(blend(source(0)))
    assert once.current == twice.streams[:1] and once.sample(0) == (0, 2)


def test_a_change_by_hand_is_a_phase() -> None:
    first = blend(source(0, 0.9), source(1, 0.1))
    then = blend(source(1), source(2), length=16)
    phase = START.enter(first).advance(4, 6).enter(then)
    saved = Position.model_validate_json(START.enter(first).advance(4, 6).model_dump_json())
    assert saved.enter(then) == phase == saved.enter(then).enter(then)


def test_a_blend_that_gave_nothing_leaves_no_trace() -> None:
    begun = START.enter(blend(source(0))).advance(4)
    assert begun.enter(blend(source(1), source(2))).enter(blend(source(3))) == begun.enter(blend(source(3)))


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("dealt", 13, "position.dealt is 13, but its streams have taken 12"),
        ("streams.0.taken", 7, "position.stretches have 96 tokens, position.streams 104"),
        ("streams.1.left_out", [[4, 4]], "position.streams.1.left_out is not a rising list of ranges below taken 6"),
        ("streams.1.left_out", [[4, 1], [3, 1]], "position.streams.1.left_out is not a rising list"),
        ("stretches.0.steps", 4, "position.stretches have 4 steps, progress.step is 3"),
        ("stretches.0.tokens_per_step", 40, "position.stretches have 120 tokens"),
        ("blend.0.stream", 1, "position.blend names streams"),
        ("blend.0.stream", 5, "position.blend names streams"),
        ("blend.0.weight", 2, None),
        ("streams.0.retired", True, "position.blend mixes"),
        ("streams.0.sequence_length", 16, "position.blend mixes"),
        ("streams.0.dataset", "synthetic", "position.streams.0.path is 'data/0'"),
        ("blend", [], "position.blend is empty although streams were read"),
    ],
)
def test_a_position_that_cannot_be_true_is_named(field: str, value: object, what: str | None) -> None:
    position = START.enter(blend(source(0), source(1))).advance(4, 3)
    assert list(position.faults(3, 12, 96)) == []
    content = json.loads(position.model_dump_json())
    *path, last = field.split(".")
    target = content
    for key in path:
        target = target[int(key) if key.isdecimal() else key]
    target[last] = value
    faults = list(Position.model_validate_json(json.dumps(content)).faults(3, 12, 96))
    # other weights are possible from this point on, but they contradict the number of samples dealt before
    if what is None:
        assert faults == ["position.dealt is 12, more than position.streams.0.taken 6 allows"]
    else:
        assert any(fault.startswith(what) for fault in faults), faults


@pytest.mark.parametrize(("samples", "tokens"), [(11, 96), (12, 95)])
def test_the_sums_agree_with_the_progress(samples: int, tokens: int) -> None:
    position = START.enter(blend(source(0), source(1))).advance(4, 3)
    assert len(list(position.faults(3, samples, tokens))) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("dataset", "0" * 63), ("order", "xyz"), ("taken", -1), ("taken", True), ("taken", 1.0), ("taken", 2**54), ("packing", "other"),  # noqa: E501
     ("sequence_length", 0), ("left_out", [[0, 0]]), ("unknown", 1), ("path", "x" * 5000), ("retired", 1)],
)  # fmt: skip
def test_every_field_is_typed_and_bounded(key: str, value: object) -> None:
    content = json.loads(START.enter(blend(source(0))).advance(4).model_dump_json())
    content["streams"][0][key] = value
    with pytest.raises(ValidationError):
        Position.model_validate_json(json.dumps(content))


def test_a_dataset_may_have_the_path_of_synthetic_data() -> None:
    position = START.enter(blend(source(0, path=SYNTHETIC))).advance(4)
    assert list(position.faults(1, 4, 32)) == []


def test_other_tokens_at_a_path_are_another_source() -> None:
    begun = START.enter(blend(source(0))).advance(4)
    grown = begun.enter(blend(replace(source(0), dataset=DATASETS[4], tokens=9000)))
    assert [stream.taken for stream in grown.streams] == [4, 0] and grown.sample(0) == (0, 0)
