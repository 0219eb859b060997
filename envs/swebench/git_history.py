"""Remove the commits after the task's commit from a repository.

Invariant: if ``HIDE_FUTURE`` succeeds, the repository contains only commits in the history of ``HEAD``: no others are
reachable from branches, tags, remotes, the reflog or stashes, and none exist as unreachable objects.
"""

from __future__ import annotations

HIDE_FUTURE = r"""
set -eu
export LC_ALL=C GIT_CONFIG_GLOBAL=/dev/null
git() { command git -c safe.directory='*' "$@"; }
later() {
    git rev-list HEAD | sort >/tmp/.past
    git cat-file --batch-all-objects --batch-check='%(objecttype) %(objectname)' |
        sed -n 's/^commit //p' | sort | comm -23 - /tmp/.past
}
found=$(later)
if [ -n "$found" ]; then
    for name in $(git remote); do git remote remove "$name"; done
    git for-each-ref --format='%(refname)' | while read -r ref; do
        git merge-base --is-ancestor "$ref" HEAD 2>/dev/null || git update-ref -d "$ref"
    done
    for name in FETCH_HEAD ORIG_HEAD MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD BISECT_HEAD; do
        rm -f ".git/$name"
    done
    git reflog expire --expire=now --all
    git repack -a -d -q
    git prune --expire=now
    found=$(later)
fi
rm -f /tmp/.past
[ -z "$found" ] || { echo "commits of the future remain: $found" >&2; exit 3; }
"""
"""A script for ``/bin/sh`` in the repository; fails if commits remain."""
