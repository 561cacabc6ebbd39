"""How a file keeps the decoder's modules: under other names, several in one matrix, transposed, interleaved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightMapping:
    """One module of a file and the modules of the decoder whose rows it holds.

    `name` and `modules` are without ".weight" or ".bias". `rows` are the output rows of each module. With
    `groups` = 1 the modules lie one after another; with G groups each module is cut into G equal parts, and
    the file has the first part of each module, then the second of each, and so on (BLOOM keeps query, key and
    value of each head together: G = heads). `transposed`: the file's weight is `[in, out]`, unquantized files
    only (GPT-2's Conv1D). `interleaved` = N heads: rotary pairs are neighbouring rows in the file, and a head's
    two halves in the decoder (llama.cpp and llama2.c).
    """

    name: str
    modules: tuple[str, ...]
    rows: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    interleaved: int = 0

    @property
    def is_rename(self) -> bool:
        """Whether the tensors are equal but for their names."""
        return len(self.modules) == 1 and not self.transposed and not self.interleaved
