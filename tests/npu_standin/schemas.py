"""The operators' schemas as text, as torch_npu 2.10.0.post4, 2.13.0 and 2.14.0 register them.

``tests/npu_contract/check_official.py`` compares them with an installed wheel.
"""

_FORWARD_TENSORS = "Tensor query, Tensor key, Tensor value"
_RANGE = "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0"
_LENGTHS = "int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None"
_SWITCHES = "int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False"

FORWARD, BACKWARD, UPDATE = "npu_fusion_attention", "npu_fusion_attention_grad", "npu_ring_attention_update"

SCHEMAS = {
    FORWARD: (
        f"({_FORWARD_TENSORS}, int head_num, str input_layout, Tensor? pse=None, Tensor? padding_mask=None, "
        f"Tensor? atten_mask=None, float scale=1., float keep_prob=1., {_RANGE}, {_LENGTHS}, {_SWITCHES}, "
        'str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0) '
        "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    BACKWARD: (
        f"({_FORWARD_TENSORS}, Tensor dy, int head_num, str input_layout, *, Tensor? pse=None, "
        "Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, "
        "Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., float keep_prob=1., "
        f"{_RANGE}, int seed=0, int offset=0, int numels=0, {_LENGTHS}, {_SWITCHES}, "
        'str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)'
    ),
    UPDATE: (
        "(Tensor prev_attn_out, Tensor prev_softmax_max, Tensor prev_softmax_sum, Tensor cur_attn_out, "
        "Tensor cur_softmax_max, Tensor cur_softmax_sum, *, Tensor? actual_seq_qlen=None, "
        'str input_layout="SBH", str input_softmax_layout="") -> (Tensor, Tensor, Tensor)'
    ),
}

_NEWER = (
    ', str softmax_layout=""',
    ", Tensor? sink=None",
    ", Tensor? dropout_mask=None, int seed=0, int offset=0)",
)


def before_7_2(text: str) -> str:
    """A schema as versions before TorchNPU 7.2.0 have it: without what came later."""
    for addition in _NEWER:
        text = text.replace(addition, ")" if addition.endswith(")") else "")
    return text
