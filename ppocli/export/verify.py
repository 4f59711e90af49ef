"""Whether an exported folder is what its source is: read back by plain transformers, from the
folder alone, and compared."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppocli.errors import CheckpointError, InputError
from ppocli.storage.model_files import find_model, is_adapter, named_base

_DIGITS = {"bf16": 8, "fp16": 11}
"""bits of the significand, the hidden one included"""
_GENERIC = ("Once upon a time", "The film was")


@dataclass(frozen=True, slots=True)
class Verified:
    """What was compared, and how close it came."""

    tensors: int
    prompts: int
    logits: float
    """relative root-mean-square difference of the logits; 0 where nothing was rounded"""
    allowed: float
    transformers: str

    def sentence(self) -> str:
        """For the user."""
        logits = "equal" if self.logits == 0 else f"within {self.logits:.1e} (rounding)"
        return (f"Verified: reloaded with transformers {self.transformers}; {self.tensors} tensors "
                f"equal, logits on {self.prompts} prompts {logits}, tokenizer equal.")


def tolerance(dtype: str, layers: int) -> float:
    """How much rounding the weights to ``dtype`` may change logits, as relative RMS.

    Rounding to nearest with p significant bits changes a weight by at most u = 2^-p of itself
    (Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 2.2). The 2L + 2
    matrices on the way through L layers contribute independent errors of that size, which add up
    as a random walk does; 4 times that leaves room for networks that amplify. A wrong, swapped or
    transposed weight gives differences of order 1.
    """
    return 4 * 2.0 ** -_DIGITS[dtype] * math.sqrt(2 * layers + 2)


def verify_model(source: Path, folder: Path, prompts: list[str], *, cast: str | None,
                 num_tensors: int, trust_remote_code: bool, check: Callable[[], None]) -> Verified:
    """Reload ``folder`` as any user would and compare it with ``source``.

    One model is in memory at a time.

    Args:
        prompts: to compare logits and tokenizers on.
        cast: the type the weights were converted to, None where they were kept as stored.
        num_tensors: how many were compared before, for the record.
        check: called between the parts; may raise to stop.

    Raises:
        CheckpointError: something differs; the message says what.
        InputError: the source itself can't be loaded.
    """
    import transformers

    hub = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    own = _load(transformers.AutoTokenizer, source, hub, InputError)
    ours = _load(transformers.AutoTokenizer, folder, hub, CheckpointError)
    compare_tokenizers(own, ours, prompts)
    ids = prompt_ids(own, prompts)
    found = []
    for place, failure in ((source, InputError), (folder, CheckpointError)):
        check()
        model = _load_policy(place, hub, failure)
        if cast is not None:  # compute in fp32, so that nothing but rounded weights counts
            model.float()
        found.append(logits_of(model, ids))
        layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 1) or 1)
        del model
        gc.collect()
    check()
    allowed = 0.0 if cast in (None, "fp32") else tolerance(str(cast), layers)
    worst = largest_difference(*found)
    if not worst <= allowed:
        raise _differs(f"logits are off by {worst:.3g} (relative RMS; allowed: {allowed:.3g})")
    generation = source / "generation_config.json"
    if generation.is_file() and generation.read_bytes() != (folder / generation.name).read_bytes():
        raise _differs(f"{generation.name} is another")
    return Verified(num_tensors, len(ids), worst, allowed, transformers.__version__)


def compare_tokenizers(own: Any, ours: Any, prompts: list[str]) -> None:
    """Ids, special tokens and the chat template must be the same.

    Raises:
        CheckpointError: they are not.
    """
    if (len(own), own.special_tokens_map) != (len(ours), ours.special_tokens_map):
        raise _differs("the tokenizer has another size or other special tokens")
    if own.chat_template != ours.chat_template:
        raise _differs("the chat template is another")
    special = " ".join(own.all_special_tokens)
    for text in (*prompts, special, *(f"{prompt}{special}" for prompt in prompts)):
        for plain in (True, False):
            a = own(text, add_special_tokens=plain)["input_ids"]
            b = ours(text, add_special_tokens=plain)["input_ids"]
            if a != b or own.decode(a) != ours.decode(b):
                raise _differs(f"the tokenizer gives other ids for {text[:60]!r}")


def verification_prompts(texts: list[str]) -> list[str]:
    """Two prompts: the run's own where there are any."""
    return list(dict.fromkeys([*filter(str.strip, texts), *_GENERIC]))[:2]


def prompt_ids(tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Token ids of each prompt; of one without any, a single token."""
    return [list(tokenizer(prompt)["input_ids"]) or [tokenizer.eos_token_id or 0]
            for prompt in prompts]


def _load(kind: Any, folder: Path, hub: dict[str, Any],
          failure: type[InputError] | type[CheckpointError], *base: Any, **more: Any) -> Any:
    try:
        return kind.from_pretrained(*base, str(folder), **hub, **more)
    except Exception as error:  # transformers and PEFT raise many kinds here, all about the folder
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise failure(f"{kind.__name__}.from_pretrained({str(folder)!r}) failed: {text[0][:300]}",
                      where=str(folder)) from error


def _load_policy(folder: Path, hub: dict[str, Any],
                 failure: type[InputError] | type[CheckpointError]) -> Any:
    """The model in a folder, or the adapter there on its base, by transformers and PEFT alone."""
    import transformers

    adapter = is_adapter(folder)
    place = Path(find_model(named_base(folder)[0], key=str(folder), needs="model")[0]
                 ) if adapter else folder
    config = _load(transformers.AutoConfig, place, hub, failure)
    kind = (transformers.AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False)
            else transformers.AutoModelForCausalLM)
    model, info = _load(kind, place, hub, failure, output_loading_info=True, dtype="auto")
    wrong = [*info["missing_keys"], *map(str, info["mismatched_keys"])]
    if wrong:
        raise failure(f"The weights in {folder} do not fit the model: {sorted(wrong)[0]}.",
                      where=str(folder))
    if adapter:
        from peft import PeftModel

        with warnings.catch_warnings():
            # PEFT asks transformers by names that are going to be dropped
            warnings.filterwarnings("ignore", category=FutureWarning)
            model = _load(PeftModel, folder, {}, failure, model)
    # Tensors may be views of the file, aligned as it happens; kernels round by alignment.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


def logits_of(model: Any, ids: list[list[int]]) -> list[Any]:
    """Logits [T, V] of each prompt, fp32, those of virtual tokens left out."""
    import torch

    found = []
    with torch.inference_mode():
        for row in ids:
            given = {"input_ids": torch.tensor([row])}
            if getattr(model.config, "is_encoder_decoder", False):
                # what the decoder says after its start and the same tokens
                start = int(model.config.decoder_start_token_id or 0)
                given["decoder_input_ids"] = torch.tensor([[start, *row[:-1]]])
            found.append(model(**given).logits[0][-len(row):].float().clone())
    return found


def largest_difference(expected: list[Any], found: list[Any]) -> float:
    """The largest relative root-mean-square difference of two lists of tensors; infinite where
    shapes differ or one isn't finite."""
    import torch

    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape:
            return math.inf
        if not torch.equal(a, b):
            gap = float((a - b).double().norm() / a.double().norm().clamp_min(1e-30))
            worst = max(worst, gap if math.isfinite(gap) else math.inf)
    return worst


def _differs(what: str) -> CheckpointError:
    return CheckpointError(f"The export differs from its source: {what}. Nothing was published.",
                           fix="please report this with the model's config.json")
