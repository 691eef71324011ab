"""What a few families are composed of, beside the blocks of plain decoders."""
