"""Serve a trained model over OpenAI's chat-completions protocol: ``agentkit serve``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentkit import progress
from agentkit.errors import ConfigError
from agentkit.evaluation import evaluation_config
from agentkit.extras import require_serving
from agentkit.model_files import problems
from agentkit.sandboxes.server.auth import checked_token, read_tokens

if TYPE_CHECKING:
    from agentkit.config import RunConfig

TOKEN = "AGENTKIT_SERVE_TOKEN"
_ANY_ENV = "FrozenLake-v1"
"""Settings of a model need an environment; it is not used."""


def serve(
    target: str | Path,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve a model until SIGINT or SIGTERM.

    Args:
        target: a run directory, a model directory, a model of the Hugging Face hub, ``"quickstart"`` or ``"smollm2"``.
        overrides: settings that replace those of the run or the defaults, as ``"engine.max_context=8192"``.
        name: the model's name in requests; None: the name of the directory, or ``target``.
        host: the address to listen on; others than loopback need a certificate.
        port: the port; 0 chooses a free one.
        token_file: file with the tokens of clients, one per line. None: the token in ``$AGENTKIT_SERVE_TOKEN``, else a
            new one, which is announced.
        certificate: path of a TLS certificate.
        key: path of the key of the certificate.
        announce: called with lines of text once the server accepts requests.

    Raises:
        MissingExtra: the extra ``serve`` is not installed.
        ConfigError: a setting is wrong, the model does not fit, or the address is in use.
        RendererError: the model's chat template cannot be used.
        EngineError: the engine does not start.
    """
    require_serving()
    from agentkit.trainers.endpoint.server import check_address

    path = Path(target)
    config = evaluation_config(target, None if (path / "config.yaml").is_file() else _ANY_ENV, overrides)
    if found := [*problems(config.model.path, "model.path", chat=True, chat_template=config.model.chat_template)]:
        raise ConfigError("\nerror: ".join(found))
    tokens = _tokens(token_file)
    check_address(host, port, certificate, key)
    made = "" if tokens else secrets.token_urlsafe(32)
    name = name or (path.resolve().name if path.is_dir() else str(target))

    def announced(url: str) -> None:
        announce(f"serving {name} at {url} (Ctrl-C ends)")
        if made:
            announce(f"OPENAI_BASE_URL={url} OPENAI_API_KEY={made}")

    settings = {"host": host, "port": port, "tokens": tokens or (made,), "certificate": certificate, "key": key}
    asyncio.run(_until_stopped(config, name, settings, announced))


async def _until_stopped(config: RunConfig, name: str, settings: dict, announced: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = asyncio.ensure_future(_serve(config, name, settings, announced))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _serve(config: RunConfig, name: str, settings: dict, announced: Callable[[str], None]) -> None:
    from transformers.utils.logging import disable_progress_bar

    from agentkit.trainers.endpoint.dialogue import Dialogues
    from agentkit.trainers.endpoint.server import ChatServer
    from agentkit.trainers.endpoint.service import ChatService
    from agentkit.trainers.models.load import load_tokenizer
    from agentkit.trainers.roles import start_engine

    disable_progress_bar()
    async with contextlib.AsyncExitStack() as stack:
        with progress.work("loading the tokenizer"):
            dialogues = Dialogues(load_tokenizer(config.model.path, config.model.chat_template), config.model)
            dialogues.of(())
        with progress.work("starting the engine"):
            engine = await stack.enter_async_context(start_engine(config))
        service = ChatService(engine, dialogues, name, config.engine.max_context)
        server = await stack.enter_async_context(ChatServer(service, **settings))
        announced(server.url)
        await asyncio.Event().wait()


def _tokens(file: str | Path | None) -> tuple[str, ...]:
    if file is not None:
        return read_tokens(Path(file), "name another file")
    token = os.environ.get(TOKEN)
    return (checked_token(token, TOKEN),) if token else ()
