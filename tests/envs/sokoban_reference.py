"""Reference implementation of Sokoban for tests: sets of coordinates, no bits, no pruning, no heuristics."""

from __future__ import annotations

from collections import deque

DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))


class Reference:
    def __init__(self, text: str) -> None:
        self.walls, self.targets, self.boxes = set(), set(), set()
        self.player = (0, 0)
        for r, line in enumerate(text.splitlines()):
            for c, symbol in enumerate(line):
                if symbol == "#":
                    self.walls.add((r, c))
                if symbol in ".*+":
                    self.targets.add((r, c))
                if symbol in "$*":
                    self.boxes.add((r, c))
                if symbol in "@+":
                    self.player = (r, c)

    def step(self, direction: int) -> float:
        on_before = len(self.boxes & self.targets)
        self.player, self.boxes = self.after(self.player, frozenset(self.boxes), direction)
        self.boxes = set(self.boxes)
        gained = len(self.boxes & self.targets) - on_before
        return -0.1 + gained + (10.0 if gained and self.boxes <= self.targets else 0.0)

    def after(self, player, boxes, direction):
        dr, dc = DIRECTIONS[direction]
        ahead = (player[0] + dr, player[1] + dc)
        beyond = (ahead[0] + dr, ahead[1] + dc)
        if ahead in self.walls or (ahead in boxes and (beyond in self.walls or beyond in boxes)):
            return player, boxes
        return ahead, (boxes - {ahead}) | {beyond} if ahead in boxes else boxes

    def fewest_moves(self) -> int | None:
        """Breadth-first search over single moves."""
        start = (self.player, frozenset(self.boxes))
        depth, queue = {start: 0}, deque([start])
        while queue:
            state = queue.popleft()
            if state[1] <= self.targets:
                return depth[state]
            for direction in range(4):
                following = self.after(*state, direction)
                if following not in depth:
                    depth[following] = depth[state] + 1
                    queue.append(following)
        return None

    def fewest_pushes(self) -> int | None:
        """0-1 breadth-first search: walking is free, a push costs one."""
        start = (self.player, frozenset(self.boxes))
        cost, queue = {start: 0}, deque([start])
        while queue:
            state = queue.popleft()
            for direction in range(4):
                following = self.after(*state, direction)
                pushed = following[1] != state[1]
                total = cost[state] + pushed
                if total < cost.get(following, 1 << 30):
                    cost[following] = total
                    (queue.append if pushed else queue.appendleft)(following)
        solved = [total for (_, boxes), total in cost.items() if boxes <= self.targets]
        return min(solved, default=None)
