"""Makes a tiny model with random weights that vLLM can serve: `python tests/model_server/tiny_model.py DIRECTORY`.

It says nothing sensible; what it says under a schema is still an answer. Its tokenizer is trained on our own prompt, so
that a prompt has about as many tokens as with a real one. Needs transformers and tokenizers, as in `.venv-vllm`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}<|assistant|>"
MARKS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make(directory: Path) -> None:
    """Writes config, weights (bfloat16, seed 0), tokenizer and chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1536, special_tokens=MARKS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests" / "golden").glob("choose_moves*.txt"))]
    tokenizer.train_from_iterator([*texts, (ROOT / "docs" / "measurement.md").read_text(encoding="utf-8")], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=MARKS[0], pad_token=MARKS[0])
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(wrapped),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
