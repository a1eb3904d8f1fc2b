"""What a safetensors file holds, told by its header alone."""

import importlib
import json
import os
import sys

import pytest
import torch
from safetensors.torch import save_file

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")


CORE = "sglang.srt.model_loader.loadplan"


def core(module):
    """A module of the core; that it is missing is a failure, not an error."""
    try:
        return importlib.import_module(f"{CORE}.{module}")
    except ModuleNotFoundError as error:
        raise AssertionError(str(error)) from None


TENSORS = {
    "x": torch.arange(6, dtype=torch.int16).view(2, 3),
    "empty": torch.zeros(0, 4),
    "scalar": torch.ones(()),
}


class TestSafetensorsHeaders:
    @pytest.mark.feature
    def test_ranges_are_the_bytes_of_official_safetensors(self, tmp_path):
        # Turns red when a range, a dtype or a shape is another than the file's.
        path = tmp_path / "a.safetensors"
        save_file(TENSORS, path)
        header = core("header").read_header(str(path))
        whole = path.read_bytes()
        found = {
            t.name: (t.torch_dtype, t.torch_shape, whole[t.begin : t.end])
            for t in header.tensors
        }
        expected = {
            name: (t.dtype, tuple(t.shape), t.numpy().tobytes())
            for name, t in TENSORS.items()
        }
        assert found == expected

    @pytest.mark.feature
    def test_damaged_files_get_the_verdict_of_official_safetensors(self, tmp_path):
        # Turns red when a short file, or one of something else, passes.
        path = tmp_path / "a.safetensors"
        save_file(TENSORS, path)
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole[:5], b"\0\x05\x16\x07" * 20):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="refused by safetensors"):
                core("header").read_header(str(path))

    @pytest.mark.feature
    def test_file_that_changed_since_is_told_by_its_header(self, tmp_path):
        # Turns red when one of the same size may take a planned file's place.
        path = tmp_path / "a.safetensors"
        save_file(TENSORS, path)
        header = core("header").read_header(str(path))
        header.check_unchanged(os.stat(path))
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes())
        os.replace(other, path)
        with pytest.raises(ValueError, match="changed while loading"):
            header.check_unchanged(os.stat(path))

    @pytest.mark.feature
    def test_index_opens_nothing_outside_the_checkpoint(self, tmp_path):
        # Turns red when an index that was downloaded chooses what is read, or a FIFO
        # in its place holds the load for ever.
        header = core("header")
        index = tmp_path / header.INDEX_NAME
        for shard in ("../a.safetensors", "/etc/passwd"):
            index.write_text(json.dumps({"weight_map": {"x": shard}}))
            with pytest.raises(ValueError, match="inside the checkpoint's folder"):
                header.read_index(str(tmp_path))
        index.unlink()
        os.mkfifo(index)
        with pytest.raises(ValueError, match="a FIFO"):
            header.read_index(str(tmp_path))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
