"""The ``tune`` command. Nothing here imports torch, omegaconf or torchtune before it is needed."""
