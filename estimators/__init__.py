"""The mathematics: pure functions of tensors, one file per algorithm; the listing of this folder is the list of algorithms."""
