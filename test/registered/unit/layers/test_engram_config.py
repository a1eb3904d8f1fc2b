"""Unit tests for `--engram-config` and what EngramEmbedding builds for it.

No GPU and no process group. Tests of what the environment variables do hold on an engine
without the argument too; all others fail there.
"""

import argparse
import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import tempfile
import unittest
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang.srt import runtime_context
from sglang.srt.layers import engram
from sglang.srt.runtime_context import (
    SpawnRanks,
    get_model,
    get_parallel,
    override_platform,
    publish,
    reset_context,
)
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

HOST_TABLE = "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE"
LAYOUT = "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT"
PEER_SHARDS = "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS"

CPU = '{"placement": "cpu"}'
CPU_PER_NODE = '{"placement": "cpu", "replication": "per_node"}'
PEER_READ = '{"lookup": "peer_read"}'

ACCEPTED = (
    'expected a JSON object with the optional keys "placement" ("gpu" or "cpu"), '
    '"replication" ("none" or "per_node") and "lookup" ("collective" or "peer_read")'
)

# Two Engram layers with two hash columns each, so tp_size 2 splits on a column.
ENGRAM_LAYOUT = engram.EngramLayout(
    max_ngram_size=2,
    layer_ids=(1, 3),
    num_embeddings=(30, 68),
    primes=(((13, 17),), ((31, 37),)),
    n_heads=2,
    head_dim=64,
)
MODEL_CONFIG = SimpleNamespace(rms_norm_eps=1e-6, hidden_size=64, hc_mult=2)
ROWS, SPLIT, DIM = 30, 13, 64


class _FakeGroup:
    """A TP group whose ranks live in this process and build in rank order."""

    broadcast: object = None
    cpu_group = None  # What ranks exchange, one that builds before them cannot.

    def __init__(self, parallel: runtime_context.ParallelContext):
        self.rank_in_group = parallel.tp_rank
        self.world_size = parallel.tp_size

    def barrier(self) -> None:
        pass

    def broadcast_object(self, obj: object, src: int) -> object:
        if self.rank_in_group == src:
            _FakeGroup.broadcast = obj
        return _FakeGroup.broadcast


class _FakePeerShards:
    def __init__(self, rows: int, dim: int, group: object):
        self.rows, self.dim = rows, dim

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.empty(self.rows, self.dim, dtype=torch.float8_e4m3fn),
            torch.empty(self.rows, self.dim // 32, dtype=torch.float8_e8m0fnu),
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def _resolve_in_worker(all_server_args: list[ServerArgs]) -> list[str]:
    """Publish one engine after another, as scheduler processes do, and resolve."""
    from sglang.srt.layers.engram_config import resolve_engram_tables

    resolved = []
    for server_args in all_server_args:
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0))
        resolved.append(str(resolve_engram_tables()))
    return resolved


class EngramConfigTestCase(CustomTestCase):
    """Nothing published, the three variables unset, everything put back afterwards."""

    def setUp(self):
        super().setUp()
        reset_context()
        self.addCleanup(reset_context)
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(mock.patch.dict(os.environ))
        for name in (HOST_TABLE, LAYOUT, PEER_SHARDS):
            os.environ.pop(name, None)
        cudart = SimpleNamespace(cudaHostRegister=lambda ptr, nbytes, flags: 0)
        for target, name, value in (
            (torch.cuda, "cudart", lambda: cudart),
            (torch.cuda, "current_device", lambda: 0),
            (engram, "_sorted_host_reads", lambda device: False),
            (engram, "_PeerShards", _FakePeerShards),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        engram._warn_host_table_ignored.cache_clear()

    def on_cuda(self, yes: bool):
        """Both ways in which the engine asks for the platform."""
        stack = contextlib.ExitStack()
        stack.enter_context(override_platform(is_cuda=yes, is_hip=False))
        stack.enter_context(mock.patch.object(engram, "is_cuda", lambda: yes))
        return stack

    def parse(self, *argv: str) -> ServerArgs:
        stderr = io.StringIO()
        try:
            with contextlib.redirect_stderr(stderr):
                namespace = _parser().parse_args(["--model-path", "dummy", *argv])
        except SystemExit:
            self.fail(f"{argv} is not accepted: {stderr.getvalue().splitlines()[-1:]}")
        return ServerArgs.from_cli_args(namespace)

    def publish(self, config: str, *argv: str, tp_size: int = 2, rank: int = 0) -> None:
        argv = ("--tp-size", str(tp_size), "--engram-config", config, *argv)
        reset_context()
        publish(self.parse(*argv), role="scheduler", ranks=SpawnRanks(world_rank=rank))

    def module(self):
        try:
            return importlib.import_module("sglang.srt.layers.engram_config")
        except ImportError as e:
            self.fail(f"the engine has no Engram configuration: {e}")

    def embed(self, rank: int = 0, tp_size: int = 2) -> engram.EngramEmbedding:
        """One layer on this rank of an engine that published nothing."""
        with get_parallel().override(tp_size=tp_size, tp_rank=rank):
            return self.embed_published()

    def embed_published(self) -> engram.EngramEmbedding:
        with get_parallel().override(tp_group=_FakeGroup(get_parallel())):
            return engram.EngramEmbedding(
                ROWS, DIM, layer_id=1, column_bounds=(0, SPLIT, ROWS)
            )

    def kind(self, embed: engram.EngramEmbedding) -> str:
        """What was built: a host layout, "peer" or "device"."""
        if embed.host_table is not None:
            self.assertIsNone(embed.peer)
            return embed.host_table.layout
        return "device" if embed.peer is None else "peer"


class TestEnvironmentOnly(EngramConfigTestCase):
    """Without `--engram-config` the three variables mean what they always meant."""

    @pytest.mark.guard(mutation="engram.py: _init_host_table ignores its layout")
    def test_per_rank_layout_holds_and_loads_only_the_ranks_rows(self):
        # Red when the per_rank table is sized or filled by anything but the shard.
        os.environ.update({HOST_TABLE: "1", LAYOUT: "per_rank"})
        table = torch.arange(ROWS * DIM).remainder(251).to(torch.uint8).view(ROWS, DIM)
        for rank, rows in ((0, slice(0, SPLIT)), (1, slice(SPLIT, ROWS))):
            embed = self.embed(rank)
            self.assertEqual(self.kind(embed), "per_rank")
            embed.weight.weight_loader(embed.weight, table.view(torch.float8_e4m3fn))
            self.assertTrue(
                torch.equal(embed.weight.data.view(torch.uint8), table[rows])
            )

    @pytest.mark.guard(mutation="engram_config.py: the default layout is per_rank")
    def test_host_table_without_a_layout_is_one_shared_table(self):
        # Red when the old default layout follows --engram-config's default.
        os.environ[HOST_TABLE] = "1"
        table = torch.arange(ROWS * DIM).remainder(251).to(torch.uint8).view(ROWS, DIM)
        ranks = [self.embed(rank) for rank in (0, 1)]
        for embed in ranks:
            self.assertEqual(self.kind(embed), "shared")
            embed.weight.weight_loader(embed.weight, table.view(torch.float8_e4m3fn))
        for embed in ranks:
            self.assertTrue(torch.equal(embed.weight.data.view(torch.uint8), table))

    @pytest.mark.guard(mutation="engram_config.py: a layout alone means a host table")
    def test_no_variable_keeps_the_shard_in_device_memory(self):
        # Red when an unset variable or a lone layout moves the table.
        os.environ[LAYOUT] = "per_rank"
        embed = self.embed()
        self.assertEqual(self.kind(embed), "device")
        self.assertEqual(embed.weight.shape, (SPLIT, DIM))

    @pytest.mark.guard(mutation="engram_config.py: host table wins over peer shards")
    def test_peer_shards_win_only_on_cuda_with_several_ranks(self):
        # Red when the precedence, its two conditions or its warning change.
        os.environ.update({HOST_TABLE: "1", PEER_SHARDS: "1"})
        for cuda, tp_size, expected in (
            (True, 2, "peer"),
            (True, 1, "shared"),
            (False, 2, "shared"),
        ):
            with self.subTest(cuda=cuda, tp_size=tp_size), self.on_cuda(cuda):
                if expected == "peer":
                    with self.assertLogs(engram.logger, logging.WARNING) as logs:
                        self.assertEqual(self.kind(self.embed(tp_size=tp_size)), "peer")
                    self.assertIn(f"{PEER_SHARDS} takes precedence", logs.output[0])
                else:
                    self.assertEqual(self.kind(self.embed(tp_size=tp_size)), expected)

    @pytest.mark.guard(mutation="engram_config.py: an unknown layout becomes shared")
    def test_unknown_layout_is_still_an_error(self):
        # Red when the layout from the environment no longer reaches _HostTable.
        os.environ.update({HOST_TABLE: "1", LAYOUT: "sharded"})
        with self.assertRaisesRegex(ValueError, f"Invalid {LAYOUT}='sharded'"):
            self.embed()

    @pytest.mark.guard(mutation="engram_config.py: startup checks a missing config")
    def test_arguments_without_a_config_resolve_whatever_the_variables_say(self):
        # Red when the startup check judges variables that no config contradicts.
        os.environ.update({HOST_TABLE: "1", PEER_SHARDS: "1", LAYOUT: "sharded"})
        self.parse().resolve_once()

    @pytest.mark.feature
    def test_published_arguments_without_a_config_leave_it_to_the_variables(self):
        # Red when a published None is taken for a configuration of defaults.
        publish(self.parse(), role="scheduler", ranks=SpawnRanks(world_rank=0))
        self.assertIsNone(getattr(get_model(), "engram_config", "missing"))
        os.environ[HOST_TABLE] = "1"
        self.assertEqual(self.kind(self.embed_published()), "shared")


class TestArgument(EngramConfigTestCase):
    """The argument, on its way from the command line to the process that builds."""

    @pytest.mark.feature
    def test_help_names_keys_values_and_an_example(self):
        # Red when a key or value is added, renamed or dropped without its help.
        words = " ".join(_parser().format_help().split())
        start = words.rfind("--engram-config ENGRAM_CONFIG")
        self.assertGreaterEqual(start, 0, "no --engram-config in --help")
        text = words[start : start + 700]
        for word in (
            '"placement" ("gpu" or "cpu")',
            '"replication" ("none"',
            '"per_node"',
            '"lookup" ("collective" or "peer_read"',
            f"Example: '{CPU}'",
        ):
            self.assertIn(word, text)

    @pytest.mark.feature
    def test_positional_order_ends_with_the_new_field(self):
        # Red when the field moves a parameter of ServerArgs' positional signature.
        from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER

        self.assertEqual(POSITIONAL_FIELD_ORDER[-1], "engram_config")

    @pytest.mark.feature
    def test_yaml_config_file_takes_a_mapping_or_a_json_string(self):
        # Red when the field's type keeps a mapping in a YAML file from being JSON.
        self.parse("--engram-config", CPU)
        for value in ("{placement: cpu}", f"'{CPU}'"):
            with self.subTest(value=value), tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "server.yaml"
                path.write_text(f"model-path: dummy\nengram-config: {value}\n")
                with mock.patch.object(logging, "basicConfig"):
                    server_args = prepare_server_args(["--config", str(path)])
                self.assertEqual(server_args.engram_config, CPU)

    @pytest.mark.feature
    def test_spawned_process_resolves_each_engines_own_arguments(self):
        # Red when the configuration travels in the environment or in a module global.
        configs = (CPU, "{}", CPU_PER_NODE)
        engines = [self.parse("--engram-config", config) for config in configs]
        engines[0].resolve_once()
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
            resolved = pool.submit(_resolve_in_worker, engines).result(timeout=300)
        self.assertEqual(
            resolved,
            [
                "placement=cpu, replication=none, lookup=collective "
                "(host layout per_rank)",
                "placement=gpu, replication=none, lookup=collective (device memory)",
                "placement=cpu, replication=per_node, lookup=collective "
                "(host layout shared)",
            ],
        )

    @pytest.mark.feature
    def test_embedding_is_built_as_configured_and_no_variable_is_written(self):
        # Red when EngramEmbedding decides by itself, or a hook writes a variable.
        self.module()
        before = dict(os.environ)
        for config, tp_size, expected in (
            (CPU, 2, "per_rank"),
            (CPU_PER_NODE, 2, "shared"),
            ("{}", 2, "device"),
            (PEER_READ, 2, "peer"),
            (PEER_READ, 1, "device"),
        ):
            with self.subTest(config=config, tp_size=tp_size), self.on_cuda(True):
                self.publish(config, tp_size=tp_size)
                self.assertEqual(self.kind(self.embed_published()), expected)
        self.assertEqual(dict(os.environ), before)

    @pytest.mark.feature
    def test_model_built_in_another_context_sees_that_contexts_config(self):
        # Red when the resolver keeps a reference to the first published context.
        self.publish("{}")
        embedded = runtime_context.create_context(
            self.parse("--engram-config", CPU), role="scheduler"
        )
        resolve = self.module().resolve_engram_tables
        self.assertEqual(resolve().placement, "gpu")
        with runtime_context.use_context(embedded):
            self.assertEqual(resolve().placement, "cpu")
        self.assertEqual(resolve().placement, "gpu")


class TestRefusals(EngramConfigTestCase):
    """What is refused: by the launcher first, and again where the model is built."""

    def refuse(self, config, message: str, *argv: str, cuda: bool = True) -> None:
        with self.on_cuda(cuda):
            server_args = self.parse(*argv)
            server_args.engram_config = config
            self.assertRefused(server_args.resolve_once, message)
            # Actors and offline tools can publish without that step.
            self.publish("{}", *argv)
            runtime_context.get_context().override("test", engram_config=config)
            self.assertRefused(self.embed_published, message)

    def assertRefused(self, call, message: str) -> None:
        with self.assertRaises(ValueError) as caught:
            call()
        text = str(caught.exception)
        self.assertTrue(text.startswith("--engram-config: "), text)
        self.assertIn(message, text)

    @pytest.mark.feature
    def test_bad_values_are_refused_with_what_was_given_and_what_is_accepted(self):
        # Red when a value is coerced, ignored or refused without the accepted ones.
        self.module()
        for config, problem in (
            ("", "Expecting value"),
            ("cpu", "Expecting value"),
            ('{"placement": "cpu"', "Expecting"),
            ("[" * 100_000, "recursion"),
            ("null", "Expected `object`, got `null`"),
            ('["placement"]', "Expected `object`, got `array`"),
            ('"cpu"', "Expected `object`, got `str`"),
            ('{"place": "cpu"}', "unknown field `place`"),
            ('{"host_layout": "shared"}', "unknown field `host_layout`"),
            ('{"placement": "CPU"}', "Invalid enum value 'CPU' - at `$.placement`"),
            ('{"replication": null}', "Expected `str`, got `null`"),
            ('{"lookup": true}', "Expected `str`, got `bool` - at `$.lookup`"),
            ('{"placement": "cpu", "placement": "gpu"}', "a key is given twice"),
            ({"placement": "cpu"}, "must be str"),
        ):
            with self.subTest(config=str(config)[:40]):
                self.refuse(config, f"cannot use {config!r}: ")
                self.refuse(config, problem)
                self.refuse(config, ACCEPTED)

    @pytest.mark.feature
    def test_combinations_that_nothing_implements_are_refused(self):
        # Red when one of them is accepted or resolves to something else.
        self.module()
        rule = 'lookup "peer_read" needs placement "gpu" and replication "none"'
        for placement, replication in (
            ("cpu", "none"),
            ("cpu", "per_node"),
            ("gpu", "per_node"),
        ):
            config = (
                f'{{"placement":"{placement}","replication":"{replication}",'
                '"lookup":"peer_read"}'
            )
            self.refuse(config, f"cannot use {config}: {rule}")
        self.refuse(
            '{"replication": "per_node"}',
            'replication "per_node" needs placement "cpu"',
        )

    @pytest.mark.feature
    def test_peer_read_is_refused_without_cuda(self):
        # Red when another platform falls back to the collective lookup silently.
        self.module()
        self.refuse(PEER_READ, 'lookup "peer_read" needs CUDA', cuda=False)

    @pytest.mark.feature
    def test_peer_read_starts_from_a_driver_without_a_gpu(self):
        # Red when the launcher asks its own machine although --device says cuda.
        self.module()
        with self.on_cuda(False):
            argv = ("--engram-config", PEER_READ, "--device", "cuda")
            self.parse(*argv).resolve_once()
            with override_platform(is_hip=True):
                self.assertRefused(self.parse(*argv).resolve_once, "needs CUDA")

    @pytest.mark.feature
    def test_per_node_is_refused_only_where_a_tp_group_spans_nodes(self):
        # Red when nodes are counted per engine, not per TP group of a stage.
        self.module()
        for nnodes, pp_size, spans in ((2, 1, 2), (4, 2, 2), (2, 2, 1), (2, 4, 1)):
            argv = ("--nnodes", str(nnodes), "--pp-size", str(pp_size))
            with self.subTest(nnodes=nnodes, pp_size=pp_size):
                if spans > 1:
                    self.refuse(
                        CPU_PER_NODE, f"here it lies on {spans} nodes; use", *argv
                    )
                else:
                    self.publish(CPU_PER_NODE, *argv)
                    self.assertEqual(self.kind(self.embed_published()), "shared")
                self.publish(CPU, *argv)
                self.assertEqual(self.kind(self.embed_published()), "per_rank")

    @pytest.mark.feature
    def test_explicit_variable_that_contradicts_is_refused_by_name(self):
        # Red when an explicit variable is overruled or wins without a word.
        self.module()
        for config, name, value, key, configured in (
            ("{}", HOST_TABLE, "1", "placement", "gpu"),
            (CPU, HOST_TABLE, "false", "placement", "cpu"),
            (PEER_READ, PEER_SHARDS, "0", "lookup", "peer_read"),
            (CPU, PEER_SHARDS, "1", "lookup", "collective"),
            (CPU, LAYOUT, "shared", "replication", "none"),
            (CPU_PER_NODE, LAYOUT, "per_rank", "replication", "per_node"),
            (CPU, LAYOUT, "sharded", "replication", "none"),
        ):
            with self.subTest(config=config, name=name, value=value):
                with mock.patch.dict(os.environ):
                    os.environ[name] = value
                    server_args = self.parse("--engram-config", config)
                    message = (
                        f'{key} is "{configured}" but {name}={value!r} is set and '
                        f"contradicts it; unset {name} or change {key}"
                    )
                    with self.on_cuda(True):
                        self.assertRefused(server_args.resolve_once, message)
                with self.on_cuda(True):
                    self.publish(config)
                    os.environ[name] = value
                    self.assertRefused(self.embed_published, message)
                os.environ.pop(name)

    @pytest.mark.feature
    def test_explicit_variable_that_agrees_or_does_not_apply_is_accepted(self):
        # Red when the mere presence of a variable is taken for a contradiction.
        self.module()
        for config, variables in (
            ("{}", {HOST_TABLE: "0", PEER_SHARDS: "0", LAYOUT: "shared"}),
            (CPU, {HOST_TABLE: "1", PEER_SHARDS: "0", LAYOUT: "per_rank"}),
            (CPU_PER_NODE, {HOST_TABLE: "1", LAYOUT: "shared"}),
            (PEER_READ, {PEER_SHARDS: "1", HOST_TABLE: "0"}),
        ):
            with self.subTest(config=config), self.on_cuda(True):
                with mock.patch.dict(os.environ, variables):
                    self.publish(config)
                    self.embed_published()

    @pytest.mark.feature
    def test_startup_check_is_a_step_that_plugins_can_wrap(self):
        # Red when the step runs outside run_hook or is missing from its list.
        from sglang.srt.arg_groups import resolution_hooks

        step = "validate_engram_config"
        self.assertIn(step, resolution_hooks._OVERRIDABLE_HOOKS)
        seen = []
        with mock.patch.dict(resolution_hooks._HOOKS, clear=True):
            resolution_hooks.register_resolution_hook(step)(
                lambda server_args, previous: seen.append(server_args)
            )
            server_args = self.parse("--engram-config", "not JSON")
            server_args.resolve_once()
        self.assertEqual(seen, [server_args])


class TestLog(EngramConfigTestCase):
    """One line an engine, whatever its TP and PP sizes."""

    def build_engine(self, *argv: str, tp_size: int = 2, stages=((1, 3),)) -> list:
        """Build every rank's Engram layers; returns the lines that were logged."""
        args = ("--tp-size", str(tp_size), "--pp-size", str(len(stages)), *argv)
        with (
            mock.patch.object(torch.distributed, "is_initialized", lambda: True),
            self.assertLogs("sglang.srt.layers.engram_config", logging.INFO) as logs,
        ):
            for world_rank in range(len(stages) * tp_size):
                reset_context()
                ranks = SpawnRanks(world_rank=world_rank)
                publish(self.parse(*args), role="scheduler", ranks=ranks)
                with get_parallel().override(tp_group=_FakeGroup(get_parallel())):
                    for layer_id in stages[get_parallel().pp_rank]:
                        engram.Engram(MODEL_CONFIG, layer_id, ENGRAM_LAYOUT)
        return [record.getMessage() for record in logs.records]

    @pytest.mark.feature
    def test_configuration_is_logged_once_by_an_engine_and_again_by_the_next(self):
        # Red when each layer, rank or stage logs, or only a process's first engine.
        first = (
            "DeepSeek-V4.1 Engram tables: placement=cpu, replication=none, "
            "lookup=collective (host layout per_rank)"
        )
        second = (
            "DeepSeek-V4.1 Engram tables: placement=gpu, replication=none, "
            "lookup=collective (device memory)"
        )
        argv = ("--engram-config", CPU)
        self.assertEqual(self.build_engine(*argv), [first])
        self.assertEqual(self.build_engine(*argv, stages=((1,), (3,))), [first])
        self.assertEqual(self.build_engine(*argv, stages=((), (1, 3))), [first])
        self.assertEqual(self.build_engine("--engram-config", "{}"), [second])

    @pytest.mark.feature
    def test_variables_are_logged_as_the_configuration_they_stand_for(self):
        # Red when an engine that only has the variables logs nothing or the defaults.
        self.module()
        for variables, expected in (
            ({}, "gpu, replication=none, lookup=collective (device memory)"),
            (
                {HOST_TABLE: "1"},
                "cpu, replication=per_node, lookup=collective (host layout shared)",
            ),
            (
                {HOST_TABLE: "1", LAYOUT: "per_rank"},
                "cpu, replication=none, lookup=collective (host layout per_rank)",
            ),
            (
                {HOST_TABLE: "1", PEER_SHARDS: "1"},
                "gpu, replication=none, lookup=peer_read (peer shards)",
            ),
        ):
            with self.subTest(variables=variables), self.on_cuda(True):
                with mock.patch.dict(os.environ, variables):
                    self.assertEqual(
                        self.build_engine(),
                        [f"DeepSeek-V4.1 Engram tables: placement={expected}"],
                    )


if __name__ == "__main__":
    unittest.main()
