"""Every number and every JSON text that a command takes: used, or refused by name."""

from __future__ import annotations

import argparse
import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadplan import cli, units
from loadplan.checkpoint.placement import Placement, parse_placement
from loadplan.commands import numbers
from loadplan.core.header import LoadPlanError

PARSER, COMMANDS = cli.make_parser()

GPUS = (1, 1 << 16, "a whole number from 1 to 65536")
MEMORY = (1 << 20, 1 << 60, "a size with its unit, like 24G, from 1M to 1048576T")

# Command, what else it needs, option: the range, as the message tells it.
OPTIONS = {
    ("inspect x", "--tp"): GPUS,
    ("inspect x", "--nodes"): GPUS,
    ("inspect x", "--gpu-memory"): MEMORY,
    ("inspect x", "--host-memory"): MEMORY,
    ("doctor", "--tp"): GPUS,
    ("doctor", "--nodes"): GPUS,
    ("doctor", "--pin"): (
        4096,
        1 << 50,
        "a size with its unit, like 24G, from 4K to 1024T",
    ),
    ("synth x", "--size"): (
        8 << 20,
        1 << 42,
        "a size with its unit, like 24G, from 8M to 4T",
    ),
    ("synth x", "--engram-fraction"): (0.05, 0.9, "a number from 0.05 to 0.9"),
    ("synth x", "--seed"): (
        0,
        (1 << 64) - 1,
        "a whole number from 0 to 18446744073709551615",
    ),
    ("synth x", "--shards"): (1, 100_000, "a whole number from 1 to 100000"),
}


def test_every_number_of_the_commands_is_here() -> None:
    """Red when an option that takes a number comes without a range."""
    taking = {
        (name, option)
        for name, command in COMMANDS.items()
        for action in command._actions
        for option in action.option_strings
        if action.type is not None and action.type.__module__ != "pathlib"
    }
    # Path is a class of another module in some versions of Python.
    taking = {key for key in taking if key[1] not in ("--out", "--plot", "--target")}
    taking -= {("load", "--engine-dir")}
    assert taking == {(command.split()[0], option) for command, option in OPTIONS}


NUMBERS = st.one_of(
    st.integers().map(str),
    st.integers(0, 1 << 70).map(str),
    st.floats().map(str),
    st.decimals(allow_nan=True, allow_infinity=True).map(str),
    st.builds("{}{}".format, st.integers(0, 1 << 21), st.sampled_from("KMGTkb")),
    st.builds("{:.3f}{}".format, st.floats(0, 9e9), st.sampled_from(["MiB", "GB", ""])),
    st.text(max_size=9),
    st.sampled_from(["", " 1", "1 ", "1_0", "0x10", "1e3", "\u0663", "9" * 5000, "+1"]),
)


@pytest.mark.parametrize("key", OPTIONS, ids=" ".join)
@settings(max_examples=150, deadline=None)
@given(text=NUMBERS)
@example(text="512")
@example(text="nan")
@example(text="9" * 400 + "T")
@example(text="-1")
@example(text="0")
def test_number_is_used_or_refused_with_name_value_and_range(
    key: tuple[str, str], text: str
) -> None:
    """Red when a value out of its range is taken, or its refusal tells less."""
    command, option = key
    low, high, words = OPTIONS[key]
    parser = PARSER
    errors: list[str] = []

    def fail(self: object, message: str) -> None:
        errors.append(message)
        raise SystemExit(2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "error", fail)
        try:
            parsed = parser.parse_args([*command.split(), f"{option}={text}"])
        except SystemExit:
            parsed = None
    if parsed is not None:
        value = getattr(parsed, option[2:].replace("-", "_"))
        assert math.isfinite(value) and low <= value <= high
        if "unit" in words:
            assert not text[-1].isdecimal()
            assert value == units.parse(text)
        else:
            assert value == type(value)(text)
        return
    (message,) = errors
    shown = repr(text) if len(repr(text)) <= 40 else f"{text!r}"[:37]
    assert message.startswith(f"argument {option}: {shown}")
    assert message.endswith(f" given, expected {words}")


@pytest.mark.parametrize("key", OPTIONS, ids=" ".join)
def test_ends_of_the_range_are_in_it(key: tuple[str, str]) -> None:
    """Red when the message promises a value that is refused."""
    command, option = key
    low, high, words = OPTIONS[key]
    parser = PARSER
    unit = "B" if "unit" in words else ""
    for value in (low, high):
        words = [*command.split(), option, f"{value}{unit}"]
        parsed = parser.parse_args(words)
        assert getattr(parsed, option[2:].replace("-", "_")) == value


def test_sizes_are_read_in_binary_units() -> None:
    """Red when 1G is a thousand millions, or a number alone is taken for bytes."""
    size = numbers.size("1B", "2T")
    texts = ("8B", "1K", "1.5M", "24g", "1GiB", "2TB")
    assert [size(text) for text in texts] == [
        *(8, 1 << 10, 3 << 19, 24 << 30, 1 << 30, 2 << 40)
    ]
    for text in ("512", "1.5", "0B", "3T", "0.1B"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' given"):
            size(text)


KEYS = st.sampled_from(["placement", "replication", "lookup", "x", ""])
VALUES = st.one_of(
    st.sampled_from(["cpu", "gpu", "none", "per_node", "collective", "peer_read"]),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        ),
        max_leaves=3,
    ),
)
CONFIGS = st.one_of(
    st.dictionaries(KEYS, VALUES, max_size=3).map(json.dumps),
    VALUES.map(json.dumps),
    st.text(max_size=20),
)


@settings(max_examples=300, deadline=None)
@given(text=CONFIGS, nodes=st.sampled_from([1, 2]))
@example(text="[" * 100_000, nodes=1)
@example(text='{"placement": ' + "9" * 5000 + "}", nodes=1)
@example(text='{"placement": "cpu", "placement": "gpu"}', nodes=1)
def test_engram_config_is_used_or_refused_with_name_value_and_choices(
    text: str, nodes: int
) -> None:
    """Red when a key or a value that means nothing is taken, or the error is raw."""
    try:
        placement = parse_placement(text, nodes=nodes)
    except LoadPlanError as error:
        assert str(error).startswith(f"--engram-config: {text[:60]!r}"[:50])
        assert '"placement" (gpu or cpu)' in str(error)
        assert len(str(error)) < 1000
        return
    given = json.loads(text)
    assert set(given) <= {"placement", "replication", "lookup"}
    assert placement == Placement(**given)
