"""vLLM servers as samplers (``rollout.engine=vllm``).

They run in an environment of their own and are spoken to over HTTP. The routes are those of
``vllm.entrypoints`` in vLLM 0.32: ``/inference/v1/generate`` takes and gives token ids,
``/collective_rpc`` with ``reload_weights`` reads new weights from a folder.
"""
