"""The mathematics: pure functions of tensors, one file per algorithm; the folder listing is the list of algorithms."""
