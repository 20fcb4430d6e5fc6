"""Data sets: conversations to token ids and a loss mask, files to samples, samples to packs.

messages.py    what a conversation is, and what is wrong with one
chat.py        which parts of a conversation, as a chat template writes it, the model itself has to generate
tokenizer.py   a tokenizer folder for data sets, ours and torchtune's
files.py       rows of files and of the Hugging Face Hub
sft.py         rows to samples
mixture.py     several data sets with weights
packing.py     samples to packs of one length that keep documents apart
batches.py     data sets of a configuration to batches, in an order that seed and epoch decide
rows.py        which rows can be used, scan.py reads them before training, source.py opens them
tokenizers.py  the tokenizer of a configuration
"""
