"""The sandbox server and its protocol."""
