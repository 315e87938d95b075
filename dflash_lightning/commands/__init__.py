"""What the sub-commands of ``dflash`` do, one file per command."""
