"""Pictures of a frozen lake. The player is visible on every cell."""

from __future__ import annotations

from agentkit.envs import grid_images
from agentkit.envs.frozen_lake.game import Lake

_ICE, _RIM, _WATER, _GOAL = (214, 234, 248), (174, 198, 217), (27, 79, 114), (244, 208, 63)
_PLAYER, _DROWNED = (192, 57, 43), (110, 44, 0)


def picture(lake: Lake, state: int) -> grid_images.Picture:
    """Paint the lake with the player at ``state``; uint8 ``[rows * 32, columns * 32, 3]``."""
    rows, columns = len(lake.rows), len(lake.rows[0])
    image = grid_images.canvas(rows, columns, _ICE)
    for index, cell in enumerate(lake.cells):
        row, column = divmod(index, columns)
        grid_images.frame(image, row, column, _RIM)
        if cell == "H":
            grid_images.disc(image, row, column, _WATER, 13)
        elif cell == "G":
            grid_images.fill(image, row, column, _GOAL, margin=4)
    grid_images.disc(image, *divmod(state, columns), _DROWNED if lake.cells[state] == "H" else _PLAYER, 8)
    return image
