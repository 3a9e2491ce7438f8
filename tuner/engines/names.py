"""Names that a space file takes from an engine's own command line, and what the setting is called here."""

from __future__ import annotations

from functools import lru_cache

from tuner.engines.versions import known

_JSON = {
    "num_speculative_tokens": "num_steps",
    "prompt_lookup_min": "ngram_min",
    "prompt_lookup_max": "ngram_max",
    "num_speculative_tokens_per_batch_size": "steps_by_batch",
    "draft_sample_method": "acceptance",
}
"""Keys of vLLM's --speculative-config."""

_SAYS = "engine.args."


def meant(kind: str, name: str) -> str | None:
    """What to write for a name that is no setting, where an engine's command line has it; None where none does.

    Args:
        kind: of the space's engine.
        name: as written, in any spelling of a flag: max_num_seqs, max-num-seqs, --max-num-seqs.
    """
    from tuner.engines.base import engine_kinds, get_engine

    if kind not in engine_kinds():
        return None
    word = _word(name)
    # Its own engine's word first.
    having = sorted((each for each, flags in _flags().items() if word in flags), key=lambda each: each != kind)
    if not having:
        return None
    whose = having[0]
    setting, said = _flags()[whose][word]
    told = f"'{name}' is a word of {whose}"
    if setting and setting in get_engine(kind).settings:
        return f"{told}; here it is '{setting}'"
    if setting:
        return f"{told} for '{setting}', which {kind} does not have"
    if said:
        return f"{told} that is said by {said}"
    if whose == kind:
        flag = "--" + word.replace("_", "-")
        return f"{told} that no setting says; what is the same for all may stand in engine.args.extra, as [{flag}]"
    return f"{told}, and {kind} has nothing of that name"


def foreign(kind: str, flag: str) -> str | None:
    """What to write for a flag of another engine that a setting says; None for one that is known here, or to nobody."""
    word = _word(flag)
    if word in _flags().get(kind, {}) or not any(flags.get(word, ("", ""))[0] for flags in _flags().values()):
        return None
    return meant(kind, flag)


@lru_cache
def _flags() -> dict[str, dict[str, tuple[str, str]]]:
    """Kind → its flags, in underscores → the setting that says it, or else what says it; both empty where none does."""
    from tuner.engines.base import engine_kinds, get_engine
    from tuner.engines.served import ServedEngine

    found: dict[str, dict[str, tuple[str, str]]] = {}
    for kind in engine_kinds():
        engine = get_engine(kind)
        if not isinstance(engine, ServedEngine):
            continue
        flags = {_word(flag): ("", "") for each in known(kind).values() for flag in each.flags if flag[:2] == "--"}
        for flag, says in engine.owned.items():
            setting = says.removeprefix(_SAYS).partition(" ")[0] if says.startswith(_SAYS) else ""
            if flag.startswith("--"):
                flags[_word(flag)] = (setting, "" if setting else says)
        found[kind] = flags
    found["vllm"] |= {key: (setting, "") for key, setting in _JSON.items()}
    return found


def _word(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
