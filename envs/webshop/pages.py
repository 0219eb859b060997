"""Text forms of a page: the three forms of WebShop, and a short one for small models.

Invariant: ``text`` and ``rich`` equal the benchmark's observations exactly; the visible texts of ``html`` are the parts
of ``text`` in order. Formatting a page changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import escape
from itertools import groupby

from agentkit.envs.webshop.session import PER_PAGE, SEARCH, Part, Session

_BLANKS = " \n\t\f\r"
_TITLE, _PASSAGE = 80, 600
"""Characters of a title, and of a description, in the compact form."""
_STYLE = (
    "body{font-family:sans-serif;margin:2em auto;max-width:60em;padding:0 1em;line-height:1.4}"
    "#instruction-text{background:#eef3fa;padding:.6em 1em;border-radius:.4em;margin-bottom:1em}"
    "form{display:inline-block;margin:.2em .3em .2em 0}.grid-item{border-top:1px solid #ccd;padding:.5em 0}"
    ".btn{padding:.4em .9em;border:1px solid #447;border-radius:.3em;background:#fff;cursor:pointer}"
    ".btn:hover,.radio-toolbar label:hover{background:#dde8f8}.radio-toolbar input{position:absolute;opacity:0}"
    ".radio-toolbar label{border:1px solid #99a;border-radius:.3em;padding:.25em .6em;margin:.15em;cursor:pointer;"
    "display:inline-block}.radio-toolbar input:checked+label{background:#247;color:#fff}"
    ".radio-toolbar input:focus+label{outline:2px solid #06c}img{max-height:12em;float:right}"
    "#search_input{width:24em;max-width:90%;padding:.4em}h4,p{margin:.3em 0}#score{font-size:1.3em;margin:1em 0}"
)


def text(session: Session) -> str:
    """Return the visible texts, separated by ``[SEP]``."""
    return " [SEP] ".join(part.text.strip() for part in _visible(session))


def rich(session: Session) -> str:
    """Return one text per line; clickable texts and clicked texts are marked."""
    written, before = "", ""
    url = session.url
    for part in _visible(session):
        line = part.text
        if part.kind == "button":
            line = f"[button] {line} [button_]"
        elif part.kind == "option" and f'"{line}"' in url:
            before = f"You have clicked {line}.\n" + before
            line = f"  [clicked button] {line} [clicked button_]"
        elif part.kind == "option":
            line = f"  [button] {line} [button_]"
        elif part.kind == "link":
            seen = session.catalogue.number(line) in session.visited
            line = f"\n[clicked button] {line} [clicked button_]" if seen else f"\n[button] {line} [button_]"
        written += line + "\n"
    return before + written


def compact(session: Session) -> str:
    """Return the page without the repeated parts; the instruction appears only on the first page."""
    if session.page == "index":
        return f"Task: {session.goal.instruction}"
    if session.page == "search_results":
        last = max(1, -(-len(session.hits) // PER_PAGE))
        lines = [f"Page {session.number} of {last}"]
        for product in map(session.catalogue.product, session.shown):
            lines.append(f"{product.asin.lower()} {product.title[:_TITLE]} {product.price_tag}")
        return "\n".join(lines)
    product = session.product
    if session.page == "item_page":
        # Chosen options are shown above the list.
        lines = [] if session.options else [f"{product.asin.lower()} {product.title[:_TITLE]} {product.price_tag}"]
        for name, values in product.options.items():
            chosen = session.options.get(name)
            lines.append(f"{name}{f' = {chosen}' if chosen else ''}: {'; '.join(values)}")
        return "\n".join(lines)
    if session.page == "item_sub_page":
        passage = " ".join(part.text.strip() for part in session.parts() if part.kind == "text")
        return f"{product.asin.lower()} {session.sub_page}: {passage[:_PASSAGE]}"
    assert session.score is not None
    return f"Bought {product.asin.lower()}. Score {session.score.reward:.2f}"


def html(session: Session, style: str = "") -> str:
    """Return the page as HTML. Forms and links lead to the same address with the parameter ``action``, the parameter
    ``search_query`` of the search bar, or the name of an option."""
    body = _receipt(session) if session.page == "done" else "".join(_grouped(session))
    head = f'<meta charset="utf-8"><title>WebShop</title>{style}'
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body><main>{body}</main></body></html>'


def styled(session: Session) -> str:
    """Return the page as HTML with a style for people."""
    return html(session, f"<style>{_STYLE}</style>")


MODES: dict[str, Callable[[Session], str]] = {"text": text, "text_rich": rich, "html": html, "compact": compact}


def _visible(session: Session) -> list[Part]:
    """Return parts with a text. The benchmark's parser drops a text of blanks if it contains a line break; otherwise it
    becomes one blank."""
    parts = [part for part in session.parts() if part.kind != "image"]
    kept = [part for part in parts if part.text.strip(_BLANKS) or (part.text and "\n" not in part.text)]
    return [part if part.text.strip(_BLANKS) else replace(part, text=" ") for part in kept]


def _receipt(session: Session) -> str:
    """Return the page after the purchase, which shows only the thanks and the score, as in the benchmark."""
    texts = [f"<p>{escape(part.text)}</p>" for part in session.parts()]
    thanks, hidden, score, details = texts[:1], texts[1:-4], texts[-4:-2], texts[-2:]
    return (
        f"{''.join(thanks)}<div hidden>{''.join(hidden)}</div>"
        f'<div id="score">{"".join(score)}</div><div hidden>{"".join(details)}</div>'
    )


def _grouped(session: Session) -> list[str]:
    """Return parts as HTML, with related parts in one element."""
    pieces: list[str] = []
    item: list[str] = []
    for kind, run in groupby(session.parts(), lambda part: part.kind):
        parts = list(run)
        if kind == "instruction":
            lines = "".join(f"<h4>{escape(part.text)}</h4>" for part in parts)
            pieces.append(f'<div id="instruction-text">{lines}</div>')
        elif kind == "option":
            pieces.append(_choices(parts, session))
        elif (session.page == "search_results" and kind in ("image", "link", "name")) or item:
            item += [_piece(part, session) for part in parts]
            if kind == "text":
                pieces.append(f'<div class="grid-item">{"".join(item)}</div>')
                item = []
        else:
            pieces += [_piece(part, session) for part in parts]
    return pieces


def _piece(part: Part, session: Session) -> str:
    shown = escape(part.text)
    label = escape(part.text.lower())
    if part.kind == "image":
        return f'<img id="product-image" alt="" src="{shown}">' if part.text else ""
    if part.kind == "link":
        return f'<h4><a class="product-link" href="?action=click%5B{label}%5D">{shown}</a></h4>'
    if part.kind == "button" and part.text == SEARCH:
        hints = 'aria-label="Search" placeholder="Search..." required autofocus'
        bar = f'<input id="search_input" name="search_query" {hints}>'
        return f'<form method="post">{bar} <button class="btn" type="submit">{shown}</button></form>'
    if part.kind == "button":
        button = f'<button class="btn" type="submit" name="action" value="click[{label}]">{shown}</button>'
        return f'<form method="post">{button}</form>'
    tag = {"title": "h2", "name": "h4"}.get(part.kind, "p")
    return f"<{tag}>{shown}</{tag}>"


def _choices(parts: list[Part], session: Session) -> str:
    """Return the HTML of one choice among options."""
    name = parts[0].group
    inputs = []
    for number, part in enumerate(parts):
        id_, value = escape(f"radio_{name}{number}"), escape(part.text)
        checked = " checked" if session.options.get(name.lower()) == part.text else ""
        inputs.append(
            f'<input type="radio" id="{id_}" name="{escape(name)}" value="{value}"{checked} '
            f'onchange="this.form.submit()"><label for="{id_}">{value}</label>'
        )
    return f'<form method="post" class="radio-toolbar">{"".join(inputs)}</form>'
