def normalised(text):
    return text.strip().lower()
