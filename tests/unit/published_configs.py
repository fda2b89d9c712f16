"""The keys that `config.json` of published models carries, by family; values where they matter. Not a test
itself."""

from __future__ import annotations

from typing import Any

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 9728,
    "max_position_embeddings": 262144, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 5000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
_LLAMA2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-chat-hf", "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.32.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
_SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": None, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.53.0.dev0",
    "use_cache": False, "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
_ACTIVATIONS = {
    "actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8,
    "observer": "memoryless", "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "int",
}  # fmt: skip
_W8A8 = {
    "config_groups": {
        "group_0": {
            "input_activations": _ACTIVATIONS, "output_activations": None, "targets": ["Linear"],
            "weights": {**_ACTIVATIONS, "dynamic": False, "observer": "mse", "strategy": "channel"},
        }
    },
    "format": "int-quantized", "global_compression_ratio": 1.2391304140415598, "ignore": ["lm_head"],
    "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
}  # fmt: skip
FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b-chat": _LLAMA2,
    "vicuna-7b-v1.5-16k": {
        **_LLAMA2, "max_sequence_length": 16384, "rope_scaling": {"factor": 4.0, "type": "linear"},
        "pad_token_id": 0,
    },
    "Llama-3.1-8B-Instruct": _LLAMA3,
    "Llama-3.2-1B-Instruct": {
        **_LLAMA3, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "tie_word_embeddings": True, "rope_scaling": {**_LLAMA3["rope_scaling"], "factor": 32.0},
    },
    "Llama-3.1 fine-tuned by unsloth": {
        **_LLAMA3, "unsloth_version": "2024.12.4", "unsloth_fixed": True, "_name_or_path": "unsloth/x",
        "_attn_implementation_autoset": True, "pad_token_id": 128004,
    },
    "Llama-3.1-8B-Instruct-quantized.w8a8": {**_LLAMA3, "quantization_config": _W8A8},
    "DeepSeek-R1-Distill-Llama-8B": {**_LLAMA3, "eos_token_id": 128001},
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        **_QWEN2, "max_position_embeddings": 131072, "rope_theta": 10000, "sliding_window": 4096,
        "tie_word_embeddings": False, "use_mrope": False,
    },
    "DeepSeek-R1-0528-Qwen3-8B": {
        **_QWEN3, "rope_scaling": {"attn_factor": 0.8782488562869419, **_YARN, "rope_type": "yarn"},
    },
    "Qwen2.5-0.5B-Instruct": _QWEN2,
    "Qwen2.5-7B-Instruct, long texts": {**_QWEN2, "rope_scaling": {"type": "yarn", **_YARN}},
    "Qwen3-4B-Instruct-2507": _QWEN3,
    "Qwen3-8B-FP8": {**_QWEN3, "quantization_config": FP8},
    "Qwen3, saved by transformers 5": {
        **{k: v for k, v in _QWEN3.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")},
        "dtype": "bfloat16", "layer_types": ["full_attention"] * 36,
        "rope_parameters": {"rope_theta": 5000000, "rope_type": "default"},
    },
    "Mistral-7B-Instruct-v0.1": _MISTRAL,
    "Mistral-7B-Instruct-v0.3": {
        **_MISTRAL, "attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None,
        "vocab_size": 32768,
    },
    "Mistral-Nemo-Instruct-2407": {
        **_MISTRAL, "attention_dropout": 0.0, "head_dim": 128, "hidden_size": 5120, "sliding_window": None,
        "max_position_embeddings": 131072, "vocab_size": 131072, "rope_theta": 1000000.0,
    },
    "SmolLM2-135M-Instruct": _SMOLLM2,
    "SmolLM3-3B": _SMOLLM3,
}  # fmt: skip
