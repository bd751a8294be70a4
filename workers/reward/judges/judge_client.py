"""The judge: a chat endpoint that scores answers, asked over HTTP beside generation. One for each rollout worker.

    score() --known, or asked already--> that score
       +--> a slot (reward.judge.concurrency) --> call --> score (question.py), which is kept
                                                   | no answer, a busy endpoint, nothing that can be read
                                                   +--> waits a little, again (call_policy.py); in the end JudgeError, or the score that stands in

Every call has a deadline, its answer a limit in bytes, a question a number of calls: whatever the endpoint does, a question ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import urllib.parse
import urllib.request

import aiohttp

from workers.config.judge import JudgeConfig
from workers.reward.judges.call_policy import BUSY, DOWN_AFTER, CallPolicy
from workers.reward.judges.question import CallError, digest, keep, rendered, request_body, score_of

LOG = logging.getLogger(__name__)


class JudgeError(RuntimeError):
    """A question has no score. `hopeless`: none has ever had one here."""

    def __init__(self, cause: str, hopeless: bool = False) -> None:
        super().__init__(cause)
        self.hopeless = hopeless


def proxy_of(url: str) -> str | None:
    """The proxy that HTTPS_PROXY names for an endpoint outside, unless NO_PROXY does; one over plain HTTP is near, and asked directly."""
    parts = urllib.parse.urlsplit(url)
    named = urllib.request.getproxies().get("https")
    if not named or parts.scheme != "https" or urllib.request.proxy_bypass(parts.netloc):
        return None
    return named if "://" in named else f"http://{named}"


class Judge:
    """Opens its connections with the first question; `close` ends what is under way.

    Counters since the start: `num_asked` questions, of which `num_cached` made no call of their own and `num_failed` had no score; `num_calls`;
    `asked_s`: seconds of questions that made calls. `num_waiting`: questions that wait for a slot now. `error`: of the last question that failed.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config, self._policy = config, CallPolicy(config)
        self._scores: dict[bytes, float] = {}
        self._slots = asyncio.Semaphore(config.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._questions: dict[tuple[bytes, bool], asyncio.Task[float]] = {}  # by digest, and whether nothing may stand in
        self._key, self._scored, self._closed, self._proxy = "", False, False, proxy_of(config.url)
        self.num_asked = self.num_cached = self.num_failed = self.num_waiting = 0
        self.asked_s, self.error = 0.0, ""

    @property
    def num_calls(self) -> int:
        """Calls made, retries included."""
        return self._policy.num_calls

    def check(self) -> None:
        """Look whether it can be asked from here. Raises `JudgeError`."""
        if not self._config.url:
            raise JudgeError("verifier 'judge' has no endpoint. Set reward.judge.url and reward.judge.model", hopeless=True)
        if (variable := self._config.api_key_env) and not os.environ.get(variable):
            raise JudgeError(f"reward.judge.api_key_env={variable!r}: there is no such environment variable. Set it where the run is started",
                             hopeless=True)

    async def score(self, prompt: str, completion: str, reference: str, strict: bool = False) -> float:
        """The score in [0, 1]; what stands in where there is none. Raises `JudgeError`: with `strict` always, where nothing may stand in, and where
        this judge has never given a score."""
        if self._closed:
            raise JudgeError("the judge is closed")
        key = digest(prompt, completion, reference)
        self.num_asked += 1
        known, asked = self._scores.get(key), self._questions.get((key, strict))
        self.num_cached += known is not None or asked is not None
        if known is not None:
            return known
        if asked is None:
            asked = self._questions[key, strict] = asyncio.create_task(self._ask(rendered(self._config, prompt, completion, reference), strict))
            asked.add_done_callback(lambda task: self._answered(key, strict, task))
        await asyncio.wait([asked])  # whoever is cancelled leaves the question to others
        error = JudgeError("the judge is closed") if asked.cancelled() else asked.exception()
        if error is None:
            return asked.result()
        self.num_failed += 1
        if not isinstance(error, JudgeError) or strict or error.hopeless or self._config.stand_in is None:
            raise error
        return self._config.stand_in

    def _answered(self, key: bytes, strict: bool, task: asyncio.Task[float]) -> None:
        del self._questions[key, strict]
        if not task.cancelled() and task.exception() is None:
            keep(self._scores, key, task.result(), self._config.cache_size)

    async def _ask(self, question: str, strict: bool) -> float:
        self.check()
        self.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.num_waiting -= 1
        if not self._policy.begin(strict):
            self._slots.release()
            raise JudgeError(f"the judge is down: {self._policy.in_a_row} questions in a row had no score. {self.error}", hopeless=not self._scored)
        began, scored = time.monotonic(), None
        try:
            score = await self._call_until_scored(request_body(self._config, question))
            scored = self._scored = True
            return score
        except CallError as error:
            scored, self.error = False, f"the judge gave no score: {error}"
            if self._policy.in_a_row in (0, DOWN_AFTER - 1):
                LOG.warning("%s", self.error)
            raise JudgeError(f"{self.error}. Look at reward.judge and its endpoint", hopeless=not self._scored) from None
        finally:
            self.asked_s += time.monotonic() - began
            self._policy.end(scored)
            self._slots.release()

    async def _call_until_scored(self, body: bytes) -> float:
        cause, number = "", 0
        while self._policy.call():
            try:
                return await self._call(body)
            except CallError as error:
                cause = f"{error} (call {number + 1} of at most {1 + self._config.max_retries})"
                if not error.again or number == self._config.max_retries:
                    raise CallError(cause) from None
            await asyncio.sleep(self._policy.delay_s(number))
            number += 1
        raise CallError(f"reward.judge.max_calls={self._config.max_calls} are used up. {cause}".strip())

    async def _call(self, body: bytes) -> float:
        url, limit = self._config.url.rstrip("/") + "/chat/completions", aiohttp.ClientTimeout(total=self._config.timeout_s)
        try:
            async with self._opened().post(url, data=body, timeout=limit, allow_redirects=False, proxy=self._proxy) as response:
                content = await self._content(response)
        except TimeoutError:
            raise CallError(f"no answer within reward.judge.timeout_s={self._config.timeout_s:g}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise CallError(f"the connection failed: {type(error).__name__} {self._shown(str(error).encode(errors='replace'))}") from None
        if response.status != 200:
            raise CallError(f"it answered {response.status} {self._shown(content)}", response.status >= 500 or response.status in BUSY)
        return score_of(self._config, content)

    async def _content(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for piece in response.content.iter_any():
            content += piece
            if len(content) > self._config.max_answer_kb << 10:
                raise CallError(f"its answer is over reward.judge.max_answer_kb={self._config.max_answer_kb}")
        return bytes(content)

    def _shown(self, content: bytes) -> str:
        """The beginning of what the endpoint said, on one line, without the key if it repeats it."""
        text = content.decode(errors="replace").replace(self._key or "\0", "***")
        return "".join(sign if sign.isprintable() else " " for sign in text[:200])

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._key = os.environ.get(self._config.api_key_env or " ", "")
            headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
            # Nothing is unpacked: a few bytes could be gigabytes.
            self._session = aiohttp.ClientSession(
                headers=headers | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
                connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    async def close(self) -> None:
        """End what is under way; whoever waits gets `JudgeError`."""
        self._closed = True
        for task in (questions := list(self._questions.values())):
            task.cancel()
        await asyncio.gather(*questions, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
