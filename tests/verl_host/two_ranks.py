"""Run as ``two_ranks.py RANK STORE`` by test_worker: one of two data-parallel ranks, which print what they found."""

import sys

import torch
import workers
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from metronome.shared_prompt.reference import ReferenceBackend
from metronome_verl.engine import building
from metronome_verl.weights import Publication

MODES = ("token-mean", "seq-mean-token-mean")
EXTRAS = {"entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1}


def grouped():
    """Eight rows, two of each prompt."""
    samples = workers.Samples()
    for first in range(0, 8, 2):
        samples.prompts[first + 1] = samples.prompts[first]
    return samples


def parts(made, rank, *shares):
    """Gradient after parts of which this rank gets its share, before the clip; and the step's metrics."""
    samples = grouped()
    for share in shares:
        rows = share[rank]
        data = samples.batch(rows) if rows else TensorDict({}, batch_size=(0,))
        made.accumulate(tu.assign_non_tensor(data, global_batch_size=8))
    seen, step = {}, made.engine.optimizer_step

    def watched():
        seen["gradient"] = workers.gradient(made)
        return step()

    made.engine.optimizer_step = watched
    with workers.restored(made):
        found = made.step()
    made.engine.optimizer_step = step
    return seen["gradient"], found


def check(made, rank, store, name, mode):
    """Shares of uneven size, empty ones among them, against even ones; the latter are left in a file."""
    made.set_loss_fn(workers.stock_loss(workers.actor_config(loss_agg_mode=mode, **EXTRAS)))
    even, once = parts(made, rank, ([0, 1, 2, 3], [4, 5, 6, 7]))
    uneven, found = parts(made, rank, ([0, 1, 2], [3]), ([], [4, 5]), ([6], []), ([7], []))
    gap = float((uneven - even).abs().max() / even.abs().max())
    assert gap < 1e-6, (name, mode, gap)
    assert abs(found["grad_norm"] / once["grad_norm"] - 1) < 1e-6
    assert found["metronome/trained/rows"] == once["metronome/trained/rows"] == 8
    assert found["pg_loss"] == once["pg_loss"] or abs(found["pg_loss"] / once["pg_loss"] - 1) < 1e-4
    if made.attends:
        assert once["metronome/attention/tokens_fed"] < once["metronome/attention/tokens_separate"]
    torch.save(even, f"{store}.{name}.{mode}.{rank}")
    print("the gradient of one batch:", name, mode, gap, flush=True)


def check_adapter():
    """What two ranks publish of a LoRA model is base plus adapter, of the whole model, and moves with a step."""
    made = workers.worker(model_options={**workers.LORA, "lora": {"merge": True}})
    workers.fill(made, 0.3)
    publication = Publication(made.engine.get_per_tensor_param, made._movement)
    before = None
    for _ in range(2):
        wanted = workers.merged(made)
        found = dict(publication()[0])
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            # Summed in another order, a value may round to the next bfloat16.
            torch.testing.assert_close(value.float(), wanted[name], rtol=2**-7, atol=1e-5)
        moved = before is None or max(float((found[n].float() - before[n].float()).abs().max()) for n in found) > 1e-3
        assert moved
        before = found
        made.set_loss_fn(workers.stock_loss(workers.actor_config()))
        made.accumulate(tu.assign_non_tensor(grouped().batch(), global_batch_size=16))
        assert made.step()["metronome/weights/changed"] == 1
    print("the adapter is published", flush=True)


if __name__ == "__main__":
    here, meeting = int(sys.argv[1]), sys.argv[2]
    workers.ready(here, 2, meeting)
    torch.set_num_threads(1)
    apart = workers.worker()
    with building(ReferenceBackend()):
        shared = workers.worker()
    shared.attends = True
    for each in MODES:
        check(apart, here, meeting, "apart", each)
        check(shared, here, meeting, "shared", each)
    check_adapter()
