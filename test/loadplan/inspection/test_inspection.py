"""What inspect says, against hand-made checkpoints, the engine's rules and a load."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm
from files import write_shard

from loadplan import cli
from loadplan.checkpoint import estimates, placement
from loadplan.checkpoint.files import read_checkpoint
from loadplan.core import header
from loadplan.core.header import LoadPlanError
from loadplan.core.plan import Route
from loadplan.inspection import plot
from loadplan.inspection.loads import Hardware, Inspection, inspect
from loadplan.synth.options import SynthOptions
from loadplan.synth.writer import synthesize

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"
ENGINE = ROOT / "build" / "engines" / "sglang" / "patched"
CPU, GPU = '{"placement": "cpu"}', '{"placement": "gpu"}'


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    return warm.run(["-m", "loadplan", *arguments], env=environment)


def look(folder: Path, *, draft: str | None = None, config: str = CPU, **machine):
    return inspect(
        [folder], machine=Hardware(**machine), engram_config=config, draft=draft
    )


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth")
    for name, mixed in (("mixed", True), ("apart", False)):
        options = SynthOptions(size=8 << 20, mixed_engram=mixed)
        synthesize(folder / name, options)
    return folder


@pytest.mark.parametrize("name", ["mixed", "apart"])
@pytest.mark.parametrize("config", [CPU, GPU])
def test_figures_equal_what_load_then_does(
    parent: Path, name: str, config: str
) -> None:
    """Red when inspect selects files, patterns or routes otherwise than the engine."""
    loaded = run(
        *("load", parent / name, "--engine-dir", ENGINE, "--engram-config", config),
        "--json",
    )
    assert loaded.returncode == 0, loaded.stderr
    inspected = run("inspect", parent / name, "--engram-config", config, "--json")
    assert inspected.returncode == 0, inspected.stderr
    report = json.loads(loaded.stdout)
    (pass_,) = json.loads(inspected.stdout)["loads"]
    moved = {
        route: {k: v for k, v in total.items() if k != "seconds"}
        for route, total in report["routes"].items()
    }
    assert pass_["routes"] == moved
    assert pass_["stock_bytes"] == report["stock_device_bytes"]


@pytest.mark.parametrize("columns", [80, 120])
def test_output_is_the_golden_one(
    parent: Path,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Piped, so without colour; red when a word, a number or the width changes."""
    monkeypatch.chdir(parent)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    # The tests' folder may lie on a disk or in memory; InstantTensor's ring differs.
    monkeypatch.setattr(header, "is_in_memory", lambda path: False)
    options = ["--tp", "4", "--draft", "dspark"]
    options += ["--gpu-memory", "32M", "--host-memory", "1G"]
    assert cli.main(["inspect", "mixed", *options]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    lines = [line.rstrip() for line in output.splitlines()]
    assert max(map(len, lines)) <= columns
    assert lines == (GOLDEN / f"inspect_{columns}.txt").read_text().splitlines()


def test_no_engine_and_no_gpu_is_touched(parent: Path) -> None:
    """Red when a look at headers imports an engine or starts CUDA."""
    code = (
        "import sys, torch; from loadplan import cli; "
        f"cli.main(['inspect', {str(parent / 'mixed')!r}]); "
        "print(sorted({n.partition('.')[0] for n in sys.modules} & "
        "{'sglang', 'vllm', 'tokenspeed', 'instanttensor', 'matplotlib'}), "
        "torch.cuda.is_initialized())"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{ENGINE}"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert result.stdout.splitlines()[-1] == "[] False", result.stderr


@pytest.mark.parametrize(
    "config",
    [
        *("{}", CPU, GPU, "[]", "7", "{", '{"placement": "disk"}', '{"x": 1}'),
        '{"placement": "cpu", "replication": "per_node"}',
        '{"replication": "per_node"}',
        '{"lookup": "peer_read"}',
        '{"placement": "cpu", "lookup": "peer_read"}',
        '{"placement": "cpu", "replication": "per_node", "lookup": "peer_read"}',
        '{"placement": "cpu", "placement": "gpu"}',
        '{"placement": ["cpu"]}',
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_placement_follows_the_engines_rules(config: str, nodes: int) -> None:
    """Red when the engine takes or refuses what inspect does not."""
    from sglang.srt.layers import engram_config

    try:
        theirs = engram_config.tables_from_config(
            engram_config.parse_engram_config(config),
            tp_size=8,
            nnodes=nodes,
            pp_size=1,
            cuda=True,
        )
    except ValueError:
        with pytest.raises(LoadPlanError, match="--engram-config: "):
            placement.parse_placement(config, nodes=nodes)
        return
    ours = placement.parse_placement(config, nodes=nodes)
    assert (ours.placement, ours.replication, ours.lookup) == (
        theirs.placement,
        theirs.replication,
        theirs.lookup,
    )
    assert ours.on_host == (theirs.host_layout is not None)


def test_dspark_naming_is_the_engines_filter(parent: Path) -> None:
    """The engine drops vision biases besides; red when it keeps or drops others."""
    from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark

    draft = SimpleNamespace(confidence_head=object())
    remap = DeepseekV4ForCausalLMDSpark._remap_dspark_weight_name
    checkpoint = read_checkpoint([parent / "mixed"])
    names = [tensor.name for file in checkpoint.headers for tensor in file.tensors]
    wanted = {name for name in names if checkpoint.is_draft_name(name, "dspark")}
    kept = {name for name in names if remap(draft, name) is not None}
    assert kept <= wanted
    assert wanted - kept == {n for n in wanted if n.endswith(".ffn.gate.bias_vl")}


@pytest.mark.parametrize(
    ("name", "kind", "is_draft"),
    [
        ("mtp.0.norm.weight", "dspark", True),
        ("mtp.0.norm.weight", "mtp", True),
        ("model.mtp.layers.0.w", "mtp", True),
        ("model.mtp_layers.0.w", "mtp", True),
        ("model.layers.61.eh_proj.weight", "mtp", True),
        ("model.layers.61.eh_proj.weight", "dspark", False),
        ("model.layers.60.mlp.weight", "mtp", False),
        ("model.mtpx.w", "mtp", False),
        ("layers.1.mtp.w", "mtp", False),
    ],
)
def test_draft_names(tmp_path: Path, name: str, kind: str, is_draft: bool) -> None:
    """Layer 61 follows the model's own 0 to 60; red when layer 60 is a draft's."""
    write_shard(tmp_path / "model.safetensors", [("a", "U8", (1,))])
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 61}')
    assert read_checkpoint([tmp_path]).is_draft_name(name, kind) is is_draft


def test_draft_file_beside_the_index_is_the_drafts_only(tmp_path: Path) -> None:
    """Red when the model loads it too, or the draft does not find it."""
    write_shard(tmp_path / "model.safetensors", [("a", "U8", (8,))])
    write_shard(tmp_path / "mtp.safetensors", [("mtp.0.w", "U8", (4,))])
    write_index(tmp_path, {"a": "model.safetensors"})
    inspection = look(tmp_path, draft="mtp")
    model, draft = inspection.loads
    assert model.stock_bytes == 8
    assert draft.routes["stream"].nbytes == 4
    (oddity,) = inspection.oddities
    assert (oddity.files, oddity.done) == (
        ("mtp.safetensors",),
        "loaded only by a draft",
    )


def test_checkpoint_without_a_draft_refuses_one(tmp_path: Path) -> None:
    """Red when a wrong --draft looks like a draft of no bytes."""
    write_shard(tmp_path / "model.safetensors", [("a", "U8", (8,))])
    with pytest.raises(LoadPlanError, match="no tensor of a dspark draft.*leave"):
        look(tmp_path, draft="dspark")


# Memory, in numbers small enough to add up by hand.

TABLE = "layers.1.engram.embed.weight"
MIB = 1 << 20


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Two matrices of 1 MiB, a vector of 4 KiB and a table of 64 MiB, all sparse."""
    for name, tensors in (
        ("a", [("w1", "U8", (1024, 1024)), ("w2", "U8", (1024, 1024))]),
        ("b", [("norm", "U8", (4096,)), (TABLE, "U8", (65536, 1024))]),
    ):
        path = write_shard(tmp_path / f"{name}.safetensors", tensors, payload=b"")
        nbytes = sum(math.prod(shape) for _, _, shape in tensors)
        os.truncate(path, path.stat().st_size + nbytes)
    write_index(
        tmp_path,
        {name: "a.safetensors" for name in ("w1", "w2")}
        | {name: "b.safetensors" for name in ("norm", TABLE)},
    )
    return tmp_path


def test_memory_adds_up(tables: Path) -> None:
    """Red when a share, a ring or a table is counted twice or not at all."""
    (load,) = look(tables, tp=2).loads
    weights = MIB + 4096
    assert load.plan_gpu.parts[estimates.WEIGHTS] == weights
    assert load.stock_gpu.parts[estimates.WEIGHTS] == weights
    assert load.plan_gpu.parts[estimates.ARRIVING] == MIB
    assert load.stock_gpu.parts[estimates.ARRIVING] == 64 * MIB
    # The norm shares the table's file, so it is read apart, by both ranks.
    assert load.routes["read"].nbytes == 4096
    assert load.plan_host.parts == {
        estimates.TABLES: 64 * MIB,
        estimates.BUFFERS: 2 * 8 * MIB,
    }
    assert load.stock_host.parts[estimates.BUFFERS] == 0
    assert load.plan_gpu.fits is None


@pytest.mark.parametrize(
    ("mib", "tp", "buffers", "arriving"),
    [(20, 1, 24, 20), (80, 1, 80, 64), (600, 1, 128, 64), (600, 2, 128, 256)],
)
def test_memory_of_tensors_that_are_read_apart(
    tmp_path: Path, mib: int, tp: int, buffers: int, arriving: int
) -> None:
    """By the core's own spans and pieces; red when a small read seems a large one."""
    tensors = [(f"w{i}", "U8", (4, MIB)) for i in range(mib // 4)]
    path = write_shard(
        tmp_path / "a.safetensors", tensors, metadata={"format": "mlx"}, payload=b""
    )
    os.truncate(path, path.stat().st_size + mib * MIB)
    (load,) = look(tmp_path, tp=tp).loads
    assert load.routes["read"].nbytes == mib * MIB
    assert load.plan_gpu.parts[estimates.RING] == 0
    assert load.plan_gpu.parts[estimates.ARRIVING] == arriving * MIB
    assert load.plan_host.parts[estimates.BUFFERS] == tp * buffers * MIB


def test_buffers_that_break_the_host_are_named(tables: Path) -> None:
    """Red when a table is blamed that would fit by itself."""
    (load,) = look(tables, tp=2, host_memory=70 * MIB).loads
    assert load.plan_host.breaks == "the read buffers"


def test_spans_that_break_the_gpu_are_named(tmp_path: Path) -> None:
    """Red when a GPU seems to hold the weights and no more than one of them."""
    tensors = [(f"w{i}", "U8", (4, MIB)) for i in range(20)]
    path = write_shard(
        tmp_path / "a.safetensors", tensors, metadata={"format": "mlx"}, payload=b""
    )
    os.truncate(path, path.stat().st_size + 80 * MIB)
    (load,) = look(tmp_path, gpu_memory=140 * MIB).loads
    assert load.plan_gpu.breaks == "w0"
    assert "64.00 MiB at once beside the weights" in load.plan_gpu.problem


def test_table_that_breaks_the_stock_gpu_is_named(tables: Path) -> None:
    """64 MiB want a ring of 64 MiB; red when 80 MiB seem enough for stock."""
    inspection = look(tables, tp=2, gpu_memory=80 * MIB)
    (load,) = inspection.loads
    assert load.stock_gpu.breaks == TABLE
    assert "InstantTensor's ring needs" in load.stock_gpu.problem
    assert load.plan_gpu.fits is True
    assert (inspection.verdict("stock"), inspection.verdict("plan")) == (False, True)


@pytest.mark.parametrize(
    ("config", "nodes", "held"),
    [
        (CPU, 1, 64),
        (CPU, 2, 32),
        ('{"placement": "cpu", "replication": "per_node"}', 1, 64),
        (GPU, 1, 0),
    ],
)
def test_host_holds_its_share(tables: Path, config: str, nodes: int, held: int) -> None:
    """Red when a host of two seems to need the whole table."""
    (load,) = look(tables, tp=2, nodes=nodes, config=config).loads
    assert load.plan_host.parts[estimates.TABLES] == held * MIB


@pytest.mark.parametrize(
    ("tp", "nodes", "rows"), [(1, 1, 1000), (3, 1, 1002), (8, 2, 500), (7, 7, 143)]
)
def test_host_tables_are_counted_as_the_engine_counts_them(
    tmp_path: Path, tp: int, nodes: int, rows: int
) -> None:
    """Each rank's rows are rounded up; red when inspect says yes and the engine no."""
    write_shard(tmp_path / "a.safetensors", [(TABLE, "U8", (1000, 16))])
    (load,) = look(tmp_path, tp=tp, nodes=nodes).loads
    assert load.plan_host.parts[estimates.TABLES] == rows * 16
    (load,) = look(tmp_path, tp=tp, nodes=nodes, host_memory=rows * 16 - 1).loads
    assert load.stock_host.breaks == TABLE
    (load,) = look(tmp_path, tp=tp, nodes=nodes, host_memory=rows * 16).loads
    assert load.stock_host.fits is True


def test_table_that_breaks_the_host_is_named_and_exit_code_is_1(
    tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a launch script that asks first would go on."""
    assert cli.main(["inspect", str(tables), "--host-memory", "32M"]) == 1
    output = capsys.readouterr()
    assert f"loadplan, model, does not fit on a host: {TABLE}" in output.out
    assert "ERROR it does not fit with loadplan either" in output.err


def test_table_in_gpu_memory_is_kept_from_the_stream_where_it_is_too_large(
    tables: Path,
) -> None:
    """Red when the ring's budget is not what the weights leave free."""
    routes = [
        look(tables, config=GPU, gpu_memory=limit * MIB).loads[0].routes["host"].tensors
        for limit in (322, 323)
    ]
    # The ring takes the table twice and what comes before it, 128 MiB and 4 KiB: half
    # of what is free. The weights take 66 MiB and 4 KiB.
    assert routes == [1, 0]


def test_groups_that_do_not_divide_are_refused() -> None:
    """Red when half a rank seems possible."""
    with pytest.raises(LoadPlanError, match="--nodes: 3 for --tp 8"):
        Hardware(tp=8, nodes=3)


# Odd things: what is found, and what will be done.


def odd(inspection: Inspection) -> dict[str, str]:
    return {oddity.what: oddity.done for oddity in inspection.oddities}


LEFT_OUT = "left out, nothing is read"
APART = "read apart from the stream, to the same place"


@pytest.mark.parametrize(
    ("tensor", "metadata", "what"),
    [
        (("x", "F4", (2, 8)), None, "sub-byte dtype F4 in its file"),
        (("x", "U8", (0, 4)), None, "zero-byte tensor in its file"),
        (("x", "U8", (4,)), {"format": "mlx"}, "metadata format 'mlx'"),
    ],
)
def test_odd_file_is_read_apart(tmp_path, tensor, metadata, what) -> None:
    """Red when something InstantTensor gets wrong is not told."""
    shard = tmp_path / "model.safetensors"
    write_shard(shard, [("a", "U8", (8,)), tensor], metadata=metadata)
    inspection = look(tmp_path)
    assert odd(inspection) == {what: APART}
    assert inspection.oddities[0].files == ("model.safetensors",)


def test_odd_files_of_a_folder(tmp_path: Path) -> None:
    """Red when a file or a copy that is set aside is not told."""
    write_shard(tmp_path / "a.safetensors", [("a", "U8", (8,))])
    shard = tmp_path / "b.safetensors"
    write_shard(shard, [("b", "U8", (8,)), ("a", "U8", (4,)), ("c", "U8", (2,))])
    write_shard(tmp_path / "consolidated.safetensors", [("a", "U8", (8,))])
    (tmp_path / "._a.safetensors").write_bytes(b"\0\5\26\7" * 25)
    write_index(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    assert odd(look(tmp_path)) == {
        "a file that the index does not name": "not loaded",
        "a hidden file": "not listed, not opened",
        "a tensor that the index does not name": "taken from the one file that has it",
        "stale copy; it belongs to a.safetensors": LEFT_OUT,
        "shares its file with a stale copy": APART,
    }


def test_odd_files_without_an_index(tmp_path: Path) -> None:
    """Red when an empty shard or a second name of a file is not told."""
    write_shard(tmp_path / "a.safetensors", [("a", "U8", (8,))])
    write_shard(tmp_path / "b.safetensors", [])
    os.link(tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    inspection = look(tmp_path)
    assert odd(inspection) == {
        "several files without an index": "all are loaded; one name in two files "
        "would be an error",
        "a file without tensors": "left out",
        "one file under several names": "loaded once",
    }
    assert inspection.loads[0].routes[Route.STREAM.value].nbytes == 8


def test_consolidated_file_beside_a_whole_one_is_set_aside(tmp_path: Path) -> None:
    """As the engine does for these two names; red when both are loaded."""
    for name in ("consolidated", "model"):
        write_shard(tmp_path / f"{name}.safetensors", [("a", "U8", (8,))])
    inspection = look(tmp_path)
    assert inspection.files == 1
    assert inspection.oddities[0].files == ("consolidated.safetensors",)


def test_files_of_one_folder_may_be_named(tables: Path) -> None:
    """Red when a list of files is not looked at alone."""
    machine = Hardware()
    files = [tables / "a.safetensors"]
    inspection = inspect(files, machine=machine, engram_config=CPU)
    assert (inspection.files, inspection.tensors) == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder or file"),
        (["."], "there are some below; name one of the folders: 'incomplete'"),
        (["a.safetensors", "sub/b.safetensors"], "that lie elsewhere or are folders"),
        (["incomplete"], "names 1 file(s) that are not there, 'b.safetensors' first"),
        (["sub", "--engram-config", "{"], "--engram-config: '{': not JSON"),
    ],
)
def test_what_cannot_be_loaded_is_one_error(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], message: str
) -> None:
    """Red when it is a traceback, or inspect says what no load could do."""
    monkeypatch.chdir(tmp_path)
    for folder in ("sub", "incomplete"):
        (tmp_path / folder).mkdir()
    write_shard(tmp_path / "sub" / "b.safetensors", [("b", "U8", (8,))])
    write_shard(tmp_path / "incomplete" / "a.safetensors", [("a", "U8", (8,))])
    index = {"a": "a.safetensors", "b": "b.safetensors"}
    write_index(tmp_path / "incomplete", index)
    assert cli.main(["inspect", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ERROR ")
    assert error.count("\n") == 1
    assert message in error


def test_names_cannot_command_a_terminal(tmp_path: Path, capsys) -> None:
    """Nor the table's own markup; red when a header's text is printed as it is."""
    name = "a\x1b]0;owned\x07[bold red]b[/]"
    write_shard(tmp_path / "model.safetensors", [(name, "U8", (8,))])
    assert cli.main(["inspect", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output and "\x07" not in output
    assert r"a\x1b]0;owned\x07[bold red]b[/]" in output


def test_reader_that_is_chosen_for_whole_files_is_followed(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when inspect tells of a stream where the engine reads."""
    monkeypatch.setenv("LOADPLAN_STREAM_READER", "read")
    routes = look(parent / "apart").loads[0].routes
    assert (routes["stream"].tensors, routes["read"].tensors) == (0, 507)


def test_tensors_that_are_too_large_are_one_line(tmp_path: Path) -> None:
    """Of 24 sizes; red when each is an oddity of its own."""
    tensors = [(f"w{i}", "U8", (i + 1, MIB)) for i in range(24)]
    path = write_shard(tmp_path / "model.safetensors", tensors, payload=b"")
    nbytes = sum(math.prod(shape) for _, _, shape in tensors)
    os.truncate(path, path.stat().st_size + nbytes)
    (found, *others) = look(tmp_path, gpu_memory=nbytes + MIB).oddities
    assert found.what == "more than the device has room for at once"
    assert (found.tensors, found.nbytes) == (24, nbytes)
    assert others == []


# The picture.


def test_picture_shows_the_routes_in_proportion(parent: Path, tmp_path: Path) -> None:
    """Counts pixels of the routes' colours; red when a bar is not drawn to scale."""
    from matplotlib import colors, image

    path = tmp_path / "plan.png"
    inspection = look(parent / "mixed")
    plot.draw(inspection, path)
    pixels = image.imread(path)
    left = pixels[:, : pixels.shape[1] // 3, :3]

    def painted(route: str) -> int:
        colour = colors.to_rgb(plot._ROUTES[route][0])
        return int((abs(left - colour).max(axis=-1) < 0.02).sum())

    (load,) = inspection.loads
    shown = painted("host") / painted("stream")
    meant = load.routes["host"].nbytes / (
        load.stock_bytes + load.routes["stream"].nbytes
    )
    # Labels in the bars and legends take or give a few pixels.
    assert shown == pytest.approx(meant, rel=0.2)


def test_picture_that_cannot_be_written_is_refused_first(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when the report is printed before the error."""
    picture = str(tmp_path / "missing" / "plan.png")
    assert cli.main(["inspect", str(parent / "mixed"), "--plot", picture]) == 1
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith(f"ERROR {picture}: no folder")


def test_picture_needs_matplotlib_and_a_known_ending(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when either is a traceback."""
    inspection = look(parent / "mixed")
    with pytest.raises(LoadPlanError, match="ends in '.doc', expected an image"):
        plot.draw(inspection, tmp_path / "plan.doc")
    with pytest.raises(LoadPlanError, match="no folder '.*missing', expected one"):
        plot.draw(inspection, tmp_path / "missing" / "plan.png")
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(LoadPlanError, match="pip install matplotlib"):
        plot.draw(inspection, tmp_path / "plan.png")
