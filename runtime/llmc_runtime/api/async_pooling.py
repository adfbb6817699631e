"""The methods of AsyncLLM for models that pool."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from typing import Any

from llmc_runtime.api.async_request import AsyncRequestState, check_timeout
from llmc_runtime.api.model_api import ModelAPI
from llmc_runtime.engine.input_processor import EngineRequest, prepare
from llmc_runtime.engine.messages import Ready
from llmc_runtime.format.names import CLASSIFY, EMBED
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.pooled_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    pooled_values,
)
from llmc_runtime.pooling_params import NO_OUTPUT, PoolingParams, require_pooling, require_task
from llmc_runtime.prompts import Prompt, refuse_adapter


class AsyncPoolingAPI(ModelAPI):
    """Requests to models that pool. A subclass runs them."""

    @property
    def config(self) -> Ready:
        """The limits in force."""
        raise NotImplementedError

    async def ensure_started(self) -> None:
        """Start the engine unless it was started, and wait until it is ready."""
        raise NotImplementedError

    def require_running(self) -> None:
        """Raise LlmcError E660 to E664 if no request would be accepted now."""
        raise NotImplementedError

    async def _prompt(self, prompt: Any) -> Prompt:
        raise NotImplementedError

    def _opened(
        self, request: EngineRequest, state: AsyncRequestState, timeout: float | None
    ) -> AbstractContextManager[None]:
        raise NotImplementedError

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None,
        request_id: str,
        lora_request: None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        timeout: float | None = None,
    ) -> AsyncGenerator[EmbeddingRequestOutput | ClassificationRequestOutput, None]:
        """Yield the embedding or the classes of one prompt (see LLM.embed and LLM.classify), once.

        The other arguments are those of AsyncLLM.generate. Raises LlmcError E616 if the model generates, and as
        `generate`.
        """
        refuse_adapter(lora_request)
        await self.ensure_started()
        pooling, params = require_pooling(self.pooling, EMBED, CLASSIFY), pooling_params or PoolingParams()
        params.check(pooling)
        outputs = self.pool(
            prompt, request_id, priority=priority, cache_salt=cache_salt, tenant=tenant, timeout=timeout
        )
        async with aclosing(outputs):
            async for o in outputs:
                values = pooled_values(o.pooled or b"", pooling, params).tolist()
                if pooling.task == EMBED:
                    yield EmbeddingRequestOutput.of(o, EmbeddingOutput(values))
                else:
                    yield ClassificationRequestOutput.of(o, ClassificationOutput(values))

    async def pool(
        self,
        prompt: Any,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        timeout: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output of one prompt, whose `pooled` has the f32 numbers that the model returned.

        Raises LlmcError as `encode`.
        """
        await self.ensure_started()
        require_task(self.pooling, EMBED, CLASSIFY)
        check_timeout(timeout)
        self.require_running()
        ready = await self._prompt(prompt)
        request = prepare(
            ready, NO_OUTPUT, [], self.config.vocab_size, priority=priority, cache_salt=cache_salt, tenant=tenant
        )
        state = AsyncRequestState("final_only", 0.0, request_id, ready.text, ready.ids, NO_OUTPUT, self.tokenizer)
        with self._opened(request, state, timeout):
            while (output := await state.next()) is not None:
                yield output
