"""Pictures of Sokoban positions. A target stays visible under a box or the player."""

from __future__ import annotations

from agentkit.envs import grid_images
from agentkit.envs.sokoban.game import Sokoban

_FLOOR, _WALL, _TARGET = (236, 226, 208), (93, 64, 55), (231, 76, 60)
_BOX, _STORED, _PLAYER = (202, 138, 52), (39, 143, 78), (41, 98, 180)


def picture(playing: Sokoban) -> grid_images.Picture:
    """Paint a position; uint8 ``[rows * 32, columns * 32, 3]``."""
    room = playing.level
    image = grid_images.canvas(room.rows, room.columns, _FLOOR)
    for cell in range(room.rows * room.columns):
        row, column = divmod(cell, room.columns)
        symbol = room.symbol(cell, playing.player, playing.boxes)
        if symbol == "#":
            grid_images.fill(image, row, column, _WALL)
        if symbol in ".*+":
            grid_images.frame(image, row, column, _TARGET, width=4)
        if symbol in "$*":
            grid_images.fill(image, row, column, _STORED if symbol == "*" else _BOX, margin=6)
        if symbol in "@+":
            grid_images.disc(image, row, column, _PLAYER, 9)
    return image
