"""From files to tokenised documents: formats, columns, rendering, masks, the processed cache; prompts too."""
