"""The same computation has the same fingerprint, a different one has not."""

import copy

import pytest
import torch
from torch import nn

from kvpress_prob.hf.fingerprint import _places, fingerprint
from tests.helpers.models import ARCHITECTURES, build, tiny_llama

accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "DeepSeek-V3", "OPT", "Mixtral", "MiniMax-M2"])
def test_the_weights_and_the_rotary_embedding(name):
    model = ARCHITECTURES[name].build()
    print_ = fingerprint(model)
    assert fingerprint(copy.deepcopy(model)) == print_
    assert fingerprint(ARCHITECTURES[name].build(seed=1)) != print_
    model.set_attn_implementation("eager")
    assert fingerprint(model) == print_
    for tensor in [*model.parameters(), *dict(model.named_buffers()).values()]:
        if any(tensor is it for it in model.state_dict(keep_vars=True).values()):
            before = tensor.flatten()[0].item()
            tensor.view(-1)[0] += 1
            assert fingerprint(model) != print_
            tensor.view(-1)[0] = before
    assert fingerprint(model) == print_


def test_rotary_settings():
    settings = [{"rope_type": "default", "rope_theta": theta} for theta in (1e4, 5e5)]
    assert fingerprint(build("LlamaForCausalLM", rope_parameters=settings[0])) != fingerprint(
        build("LlamaForCausalLM", rope_parameters=settings[1])
    )


@pytest.mark.parametrize(
    ("architecture", "one", "other"),
    [
        ("GraniteForCausalLM", {"attention_multiplier": 0.2}, {"attention_multiplier": 0.4}),
        ("LlamaForCausalLM", {"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-2}),
        ("LlamaForCausalLM", {"hidden_act": "silu"}, {"hidden_act": "gelu"}),
        ("Gemma2ForCausalLM", {"sliding_window": 16}, {"sliding_window": 32}),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 16}, {"query_pre_attn_scalar": 64}),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1]}, {"no_rope_layers": [1, 0]}),
        ("MixtralForCausalLM", {"num_experts_per_tok": 1}, {"num_experts_per_tok": 2}),
        (
            "LlamaForCausalLM",
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
            {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
        ),
    ],
)
def test_settings_of_the_computation(architecture, one, other):
    """Equal weights; what is done with them differs."""
    assert fingerprint(build(architecture, **one)) == fingerprint(build(architecture, **one))
    assert fingerprint(build(architecture, **one)) != fingerprint(build(architecture, **other))


def test_what_is_only_said_of_a_model_does_not_count():
    model = tiny_llama()
    print_ = fingerprint(model)
    model.config.use_cache, model.config.name_or_path, model.config.pad_token_id = False, "elsewhere", 7
    assert fingerprint(model) == print_


def test_data_types():
    assert fingerprint(tiny_llama().bfloat16()) != fingerprint(tiny_llama().bfloat16().float())


# -- Adapters ----------------------------------------------------------------------------------------------------------

KINDS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False, use_dora=True),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "whole module": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj"], init_lora_weights=False, modules_to_save=["norm"]
    ),
}


def adapted(kind, names=("a",), seed=1):
    model = tiny_llama()
    torch.manual_seed(seed)
    for name in names:
        model.add_adapter(KINDS[kind](), adapter_name=name)
    model.set_adapter(names[0])
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_that_are_switched_off(kind):
    """The same as without any; another one while they are on, and back."""
    plain, model = fingerprint(tiny_llama()), adapted(kind)
    on = fingerprint(model)
    assert on != plain
    model.disable_adapters()
    assert fingerprint(model) == plain
    model.enable_adapters()
    assert fingerprint(model) == on
    assert fingerprint(adapted(kind)) == on
    assert fingerprint(adapted(kind, seed=2)) != on


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_which_adapter_is_active(kind):
    model = adapted(kind, ("a", "b"))
    first = fingerprint(model)
    model.set_adapter("b")
    assert fingerprint(model) != first
    model.set_adapter("a")
    assert fingerprint(model) == first
    model.set_adapter(["a", "b"])
    assert fingerprint(model) != first


def test_an_adapters_scaling():
    model = adapted("lora")
    before = fingerprint(model)
    model.model.layers[0].self_attn.q_proj.set_scale("a", 0.5)
    assert fingerprint(model) != before


def test_a_merged_adapter_is_the_model_that_it_was_merged_into():
    model, other = (peft.PeftModel(tiny_llama(), KINDS["lora"](), "a").eval() for _ in range(2))
    other.load_state_dict(model.state_dict())
    model.merge_adapter()
    merged = fingerprint(model.get_base_model())
    assert merged == fingerprint(other.merge_and_unload())
    assert merged != fingerprint(tiny_llama())


# -- Off-loaded weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "MiniMax-M2"])
@pytest.mark.parametrize("where", ["cpu", "disk", "cpu, whole layers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_off_loaded_weights(name, where, dtype, tmp_path):
    model, other = (ARCHITECTURES[name].build(seed=seed, dtype=dtype) for seed in (0, 1))
    plain = fingerprint(model)
    prints = []
    for index, it in enumerate((model, other)):
        if where == "disk":
            accelerate.disk_offload(it, tmp_path / str(index), execution_device=torch.device("cpu"))
        else:
            whole = ["LlamaDecoderLayer", "Gemma2DecoderLayer"] if "whole" in where else None
            accelerate.cpu_offload(it, execution_device=torch.device("cpu"), preload_module_classes=whole)
        assert any(parameter.is_meta for parameter in it.parameters())
        prints.append(fingerprint(it))
    assert prints[0] == plain
    assert prints[1] != plain


def test_off_loaded_adapters():
    plain = fingerprint(adapted("lora"))
    model = accelerate.cpu_offload(adapted("lora"), execution_device=torch.device("cpu"))
    assert fingerprint(model) == plain
    model.disable_adapters()
    assert fingerprint(model) == fingerprint(tiny_llama())


def test_tied_embeddings():
    plain = build("LlamaForCausalLM", tie_word_embeddings=True)
    print_ = fingerprint(plain)
    assert fingerprint(accelerate.cpu_offload(plain, execution_device=torch.device("cpu"))) == print_
    assert fingerprint(build("LlamaForCausalLM", tie_word_embeddings=False)) != print_


# -- Quantised weights -------------------------------------------------------------------------------------------------


class Quantised(torch.Tensor):
    """A weight as torchao keeps them: packed numbers and scales, and no view of any kind."""

    @staticmethod
    def __new__(cls, packed, scale, bits):
        return torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=scale.dtype)

    def __init__(self, packed, scale, bits):
        self.packed, self.scale, self.bits = packed, scale, bits

    def __tensor_flatten__(self):
        return ["packed", "scale"], {"bits": self.bits}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].packed, args[0].scale, args[0].bits)
        raise NotImplementedError(f"{func} of a quantised weight")


def quantised(seed=0, scale=1.0, bits=8, nested=False, dtype=torch.int8):
    model = tiny_llama(seed=seed)
    for layer in model.model.layers:
        weight = layer.mlp.down_proj.weight
        packed = (weight * 100).to(dtype)
        scales = weight.abs().amax(-1, keepdim=True) * scale
        scales = Quantised(scales.to(torch.int8), scales, 8) if nested else scales
        layer.mlp.down_proj.weight = nn.Parameter(Quantised(packed, scales, bits), requires_grad=False)
    return model


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_quantised_weights_that_cannot_be_flattened(nested, dtype):
    settings = {"nested": nested, "dtype": dtype}
    print_ = fingerprint(quantised(**settings))
    assert fingerprint(quantised(**settings)) == print_
    assert fingerprint(quantised(seed=1, **settings)) != print_
    assert fingerprint(quantised(scale=2.0, **settings)) != print_
    assert fingerprint(quantised(bits=4, **settings)) != print_


def test_scales_beside_a_packed_weight():
    """bitsandbytes' layout: integers in the parameter, scales as its attributes."""

    def packed(scale):
        model = tiny_llama()
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.int8), requires_grad=False)
        weight.SCB = torch.full((64,), scale)
        model.model.layers[0].self_attn.q_proj.weight = weight
        return fingerprint(model)

    assert packed(1.0) == packed(1.0)
    assert packed(1.0) != packed(2.0)


@pytest.mark.parametrize("count", [1, 2, 9, 28_311_552, 2**33 + 1])
def test_reads_inside_parameters_of_any_size(count):
    """28,311,552 is the demo model's table of embeddings: float32 rounds its last place up."""
    places = _places(count)
    assert (places[0], places[-1]) == (0, count - 1)
    assert (places.diff() >= 0).all()
