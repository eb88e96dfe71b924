"""From text, rows or chats to fixed blocks of tokens, and from blocks to the batches of a step."""
