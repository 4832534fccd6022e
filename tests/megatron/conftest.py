"""One process group of one process, and the answers of a GPU, for all tests of this folder."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _room(tmp_path_factory):
    pytest.importorskip("megatron.core", reason="megatron-core isn't installed: requirements/megatron.txt")
    import cpu_room
    from megatron.core import parallel_state

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cpu_room.furnish(monkeypatch)
        yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    torch.set_num_threads(before)
