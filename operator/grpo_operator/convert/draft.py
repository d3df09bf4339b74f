"""A GRPOJob in the making: fields, facts that several fields depend on, and the report."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_operator.api.catalog.megatron.fields import problem
from grpo_operator.convert.reading.source import Option, Source
from grpo_operator.convert.rules import Always, Fact, Refused, Rule, Table, Take, is_one_of, rule_of

_SPEED = "rollout.template.engine."  # fields that do not change what is learned
_UNKNOWN = "no counterpart is known: see docs/reference/grpojob.md"


@dataclass(slots=True)
class Draft:
    """Fields of the spec by their dotted names, and what the report says about them."""

    fields: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Option] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def read(self, options: Iterable[Option], table: Table) -> None:
        """Apply the rules of a table to the options."""
        for option in options:
            self._apply(option, rule_of(table, option.name))

    def assume(self, defaults: Mapping[str, Any], source: Source, table: Table, framework: str) -> None:
        """Take a framework's defaults over for options that the source does not set."""
        for name, value in defaults.items():
            given = source.get(name)
            if given is None or given.value is None:
                before = len(self.taken)
                self.read([Option(name, value, _shown(value))], table)
                self.chosen += [f"{line}: the default of {framework}" for line in self.taken[before:]]
                del self.taken[before:]

    def choose(self, name: str, value: Any, reason: str) -> None:
        """Set a field that the source does not decide, with the reason."""
        self.fields[name] = value
        self.chosen.append(f"{name}: {_shown(value)}: {reason}")

    def take(self, name: str, value: Any) -> None:
        """Set a field from a fact whose option is in the report already."""
        self.fields[name] = value

    def fact(self, name: str, default: Any = None) -> Any:
        """Return a fact, or the default where the source does not have it or has null."""
        value = self.facts.get(name)
        return default if value is None else value

    def lacks(self, name: str, instead: str) -> None:
        """Report that the option behind a fact has no counterpart."""
        option = self.options.get(name)
        self.missing.append(f"{option or name}: {instead}")

    def refuse(self, name: str, instead: str) -> None:
        """Report that the job would train something else than the option behind a fact says."""
        option = self.options.get(name)
        self.errors.append(f"{option or name}: {instead}")

    def _apply(self, option: Option, rule: Rule | None) -> None:
        if option.unknown and isinstance(rule, Take) and rule.field.startswith(_SPEED):
            self.missing.append(f"{option}: {option.unknown}: the job has its own value")
        elif option.unknown and isinstance(rule, Take | Refused | Fact) and not getattr(rule, "text", False):
            self.errors.append(f"{option}: {option.unknown}")
        elif isinstance(rule, Take | Fact):
            self._take(option, rule)
        elif isinstance(rule, Always) and (rule.values is None or is_one_of(option.value, rule.values)):
            self.taken.append(f"{option} -> {rule.how}")
        elif isinstance(rule, Always):
            self.missing.append(f"{option}: {rule.how}")
        elif rule is None:
            self.missing.append(f"{option}: {_UNKNOWN}")
        elif is_one_of(option.value, rule.off):
            self.taken.append(f"{option} -> not used here either")
        else:
            lines = self.errors if isinstance(rule, Refused) else self.missing
            lines.append(f"{option}: {rule.instead}")

    def _take(self, option: Option, rule: Take | Fact) -> None:
        try:
            value = None if option.value is None else rule.convert(option.value)
        except ValueError as error:
            self.errors.append(f"{option}: {error}")
            return
        if isinstance(rule, Fact):
            self.facts[rule.name], self.options[rule.name] = value, option
            self.taken.append(f"{option} -> {rule.about}")
        elif value is not None:
            self.fields[rule.field] = value
            self.taken.append(f"{option} -> {rule.field}")
        else:
            self.taken.append(f"{option} -> not used here either")

    def megatron(self, option: Option, name: str) -> None:
        """Pass a field of Megatron-Core's TransformerConfig on, or report why it cannot be."""
        if obstacle := problem(name, option.value):
            self.missing.append(f"{option}: {obstacle}")
            return
        self.fields[f"trainer.megatron.{name}"] = option.value
        self.taken.append(f"{option} -> trainer.megatron.{name}")

    def spec(self) -> dict[str, Any]:
        """Return the fields as a nested mapping."""
        nested: dict[str, Any] = {}
        for name, value in self.fields.items():
            *parents, last = name.split(".")
            inner = nested
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = value
        return nested


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
