"""Does this checkpoint, through this entry point, still give these tokens?"""
