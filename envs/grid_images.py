"""Paint pictures of grids with numpy.

Invariant: a cell is a square of ``TILE`` pixels; colours are RGB triples of 0 to 255.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

TILE = 32
Colour = tuple[int, int, int]
Picture = NDArray[np.uint8]


def canvas(rows: int, columns: int, colour: Colour) -> Picture:
    """Return a picture of ``rows`` times ``columns`` cells of one colour."""
    picture = np.empty((rows * TILE, columns * TILE, 3), np.uint8)
    picture[:] = colour
    return picture


def fill(picture: Picture, row: int, column: int, colour: Colour, margin: int = 0) -> None:
    """Paint a square into a cell, ``margin`` pixels from its border."""
    top, left = row * TILE + margin, column * TILE + margin
    side = TILE - 2 * margin
    picture[top : top + side, left : left + side] = colour


def disc(picture: Picture, row: int, column: int, colour: Colour, radius: float) -> None:
    """Paint a disc of ``radius`` pixels into the centre of a cell."""
    cell = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
    cell[_distance() <= radius] = colour


def frame(picture: Picture, row: int, column: int, colour: Colour, width: int = 1) -> None:
    """Paint the border of a cell, ``width`` pixels wide."""
    cell = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
    cell[:width] = cell[-width:] = colour
    cell[:, :width] = cell[:, -width:] = colour


@cache
def _distance() -> NDArray[np.float64]:
    """Return the distance of each pixel of a cell from its centre."""
    axis = np.arange(TILE) - (TILE - 1) / 2
    return np.hypot(axis[:, None], axis[None, :])
