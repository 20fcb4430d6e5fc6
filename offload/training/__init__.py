"""What the recipes share; with the recipes themselves, the only part that imports torchtune."""
