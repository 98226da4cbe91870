"""Does a change keep what onbeat decides, how fast it is and how well it predicts?"""
