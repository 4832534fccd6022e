"""The benchmark against AReaL's tree training: the same work, and the same results of all ways."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import areal_tree
import torch


def test_tree_training_packed_rows_and_shared_prompts_are_the_same_work(tmp_path, monkeypatch):
    """On a CPU tree training goes through its mask as a dense tensor."""
    import areal.engine.fsdp_engine as host

    monkeypatch.setattr(host, "build_tree_attn_kwargs", host.build_tree_attn_kwargs)
    areal_tree.save_model(tmp_path, layers=2, hidden=64, vocabulary=512)
    shape = (40, 8, 11)  # 128 tokens a group, tree training's block
    found, tensors = {}, {}
    for way in areal_tree.WAYS:
        found[way], tensors[way] = areal_tree.run(way, tmp_path, shape, groups=2, repeats=1)
    for way, one in areal_tree.differences(tensors).items():
        assert one["log_probs"] < 1e-5, way
        assert one["gradient"] < 5e-6, way
    monkeypatch.setattr(areal_tree, "dense_mask", _causal)
    wrong = {**tensors, "tree": areal_tree.run("tree", tmp_path, shape, groups=2, repeats=1)[1]}
    assert areal_tree.differences(wrong)["tree"]["log_probs"] > 1e-2  # the comparison can fail
    assert areal_tree.differences(wrong)["tree"]["gradient"] > 1e-2
    assert len(tensors["packed"]["log_probs"]) == found["tree"]["same_work"]["trained_tokens"] == 176
    assert found["shared"]["tokens_fed"] == found["shared"]["tokens"] == 256
    assert found["packed"]["tokens"] == 2 * 8 * 51
    assert found["tree"]["tokens"] <= found["shared"]["tokens"]  # a response's first tokens may be shared too
    assert found["tree"]["tokens_fed"] == 256  # padded to its blocks
    merged = areal_tree.merged([found["tree"], found["tree"]])
    assert merged["seconds"]["update"] == found["tree"]["update"][0]


def _causal(trie, padded_size, device, **_):
    """Siblings see each other."""
    mask = torch.ones(padded_size, padded_size, dtype=torch.bool).tril()
    return {"attention_mask": {"full_attention": mask[None, None], "sliding_attention": None}}
