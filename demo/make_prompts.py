"""Write the demo's prompts: templates over topics and tasks, and stubs of the standard library's functions.

    python demo/make_prompts.py --out demo/prompts

The topics and tasks that are held out for evaluation never occur in the training prompts. The prompts in this folder
were made with Python 3.11.7: another standard library gives other stubs.
"""

import argparse
import ast
import importlib.util
import json
import random
from pathlib import Path

TOPICS = """photosynthesis|the water cycle|black holes|plate tectonics|vaccines|the immune system|DNA|evolution|
gravity|electricity|magnets|the French Revolution|the Roman Empire|the Silk Road|the Industrial Revolution|
World War I|ancient Egypt|the Renaissance|the Cold War|the printing press|climate change|renewable energy|
solar panels|recycling|coral reefs|rainforests|deserts|volcanoes|earthquakes|hurricanes|healthy eating|
regular exercise|good sleep|stress management|meditation|yoga|running a marathon|swimming|cycling to work|
learning to cook|baking bread|making coffee|growing tomatoes|keeping a garden|caring for a dog|caring for a cat|
keeping bees|bird watching|hiking|camping|travelling alone|visiting Japan|visiting Italy|visiting Mexico|
a weekend in Paris|packing a suitcase|learning a new language|reading more books|writing a diary|time management|
setting goals|public speaking|job interviews|writing a resume|working from home|teamwork|leadership|conflict at work|
asking for a raise|starting a small business|saving money|budgeting|investing|credit cards|insurance|buying a house|
renting an apartment|moving to a new city|making friends|raising children|helping with homework|choosing a college|
studying for exams|taking notes|critical thinking|creativity|music theory|playing the guitar|playing the piano|
painting with watercolors|photography|film making|poetry|Shakespeare|science fiction|chess|football|basketball|tennis|
the Olympic Games|board games|video games|artificial intelligence|machine learning|neural networks|the internet|
computer security|passwords|cloud computing|databases|open source software|programming for beginners|algorithms|
robots|self-driving cars|electric cars|space travel|the moon|Mars|the solar system|telescopes|atoms|
chemical reactions|the periodic table|fractions|algebra|geometry|statistics|probability|calculus|prime numbers|
democracy|human rights|the United Nations|elections|taxes|inflation|supply and demand|globalization|social media|
advertising|email etiquette|fake news|ethics|philosophy|Buddhism|mythology|dreams|memory|emotions|happiness|gratitude|
kindness|honesty|courage|a lost dog|a dragon|a lighthouse keeper|a time machine|a talking tree|two rival bakers|
a brave mouse|a haunted library|an old sailor|a robot who learns to paint|the last day of summer|a secret garden|
a village in the mountains|a train journey|a long winter"""

HELDOUT_TOPICS = """penguins|the Great Wall of China|making pizza|learning to swim|rainbows|antibiotics|
public libraries|jazz|the Amazon river|a clever fox|time zones|the stock market|choosing a laptop|growing herbs|
the human heart|a forgotten map|good manners|wind power|planning a birthday party|the ocean|remote teams|insects|
a king who could not sleep|glaciers|running shoes"""

CHAT = """What is {t}?|Explain {t} in simple terms.|Tell me about {t}.|Write a short paragraph about {t}.|
Give me five tips about {t}.|What are the most important facts about {t}?|Write a short story about {t}.|
Write a poem about {t}.|Why does {t} matter?|List the main advantages and disadvantages of {t}.|
How would you describe {t} to a ten year old child?|Write an email to a friend about {t}.|
What are common mistakes people make about {t}?|Summarize what everyone should know about {t}.|
Write an introduction for a blog post about {t}.|What questions should I ask about {t}?|
Create an outline for a talk about {t}.|Can you help me understand {t}?|I am curious about {t}. Where should I start?|
Give me a step by step guide to {t}.|Compare {t} with something similar."""

TASKS = """reverses a string|checks whether a string is a palindrome|counts the vowels in a string|
counts the words in a text|returns the longest word in a sentence|removes duplicates from a list|
sorts a list of numbers|finds the maximum of a list|finds the second largest number in a list|
computes the sum of a list|computes the average of a list|computes the median of a list|merges two sorted lists|
merges two dictionaries|inverts a dictionary|counts how often each item occurs in a list|
finds the common elements of two lists|flattens a nested list|splits a list into chunks of size n|
rotates a list by k places|computes the factorial of n|computes the nth Fibonacci number|
checks whether a number is prime|lists all primes up to n|computes the greatest common divisor of two numbers|
computes the least common multiple of two numbers|converts Celsius to Fahrenheit|converts a decimal number to binary|
converts a Roman numeral to an integer|checks whether a year is a leap year|
computes the number of days between two dates|formats a date as a string|reads a file and returns its lines|
writes a list of lines to a file|counts the lines of a file|finds all files with a given extension|parses a CSV file|
loads a JSON file|saves a dictionary as JSON|downloads a web page|parses an email address|validates a phone number|
validates a password|generates a random password|shuffles a list|picks a random element from a list|
computes the area of a circle|computes the distance between two points|solves a quadratic equation|
multiplies two matrices|transposes a matrix|adds two vectors|computes the dot product of two vectors|
implements binary search|implements linear search|implements bubble sort|implements insertion sort|
implements selection sort|implements quicksort|implements merge sort|implements a stack|implements a queue|
implements a linked list|implements a binary search tree|implements breadth first search|
implements depth first search|computes the edit distance of two strings|checks whether two strings are anagrams|
compresses a string by run length encoding|encrypts a text with the Caesar cipher|counts the set bits of an integer|
swaps two variables|prints a multiplication table|prints the numbers from 1 to n|prints a triangle of stars|
plays rock paper scissors|simulates rolling a dice|guesses a number|converts seconds to hours, minutes and seconds|
computes compound interest|computes the tax of a price|finds the missing number in a list|
finds two numbers in a list that add up to a target|removes punctuation from a text|capitalizes every word|
replaces spaces with underscores|filters the even numbers of a list|squares every number of a list|
groups words by their first letter|finds the first non repeating character|checks whether parentheses are balanced|
evaluates a polynomial|generates all permutations of a list|generates all subsets of a set|
computes the power of a number|computes the digits' sum of a number|reverses the digits of a number|
checks whether a number is perfect|checks whether a list is sorted|zips two lists into a dictionary|
sorts a dictionary by value|finds the shortest string in a list|joins a list of strings with commas|
measures how long a function takes|retries a function three times|logs messages to a file|reads a configuration file|
counts characters in a string|finds the index of an element|removes None values from a list|computes a running total|
normalizes a list of numbers"""

HELDOUT_TASKS = """checks whether a list contains duplicates|finds the minimum of a list|
counts the consonants in a string|computes the product of a list of numbers|converts miles to kilometers|
removes all negative numbers from a list|returns the last n elements of a list|computes the area of a triangle|
finds the most common word in a text|counts the uppercase letters of a string|implements a priority queue|
computes the standard deviation of a list|checks whether a number is even or odd|converts a string to title case|
computes the sum of the squares of the first n numbers|interleaves two lists|
finds the longest common prefix of a list of strings|converts a binary string to an integer|
computes the perimeter of a rectangle|deletes a key from a dictionary if it exists|
prints the even numbers from 1 to n|finds the difference of two sets|computes the body mass index|
repeats a string n times|counts the spaces in a string"""

CODE = """Write a Python function that {t}.|Write a Python function which {t}. Include a docstring.|
Write a Python program that {t}, with an example of its use.|How do I write Python code that {t}?|
Show me a short Python example that {t}.|Give me a Python class or function that {t} and explain how it works.|
Write a Python function that {t} and a test for it.|Please implement a function in Python that {t}. Use type hints.|
I need Python code that {t}. Keep it simple.|Write a JavaScript function that {t}."""

MODULES = """argparse base64 bisect calendar cmd codecs collections colorsys configparser contextlib copy csv datetime
decimal difflib dis email.utils enum filecmp fileinput fnmatch fractions ftplib functools gettext glob gzip hashlib
heapq hmac html imaplib inspect ipaddress json keyword linecache locale logging mailbox mimetypes netrc nntplib ntpath
numbers operator optparse os pathlib pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile
pstats queue quopri random reprlib sched secrets shelve shlex shutil smtplib socket socketserver sqlite3.dump
statistics string stringprep struct subprocess tarfile telnetlib tempfile textwrap threading timeit token tokenize
trace traceback types typing unittest.case unittest.mock urllib.parse urllib.request uuid warnings wave weakref
webbrowser xml.dom.minidom xml.etree.ElementTree zipapp zipfile asyncio.tasks asyncio.streams asyncio.queues
concurrent.futures.thread http.client http.cookies http.server importlib.util logging.handlers multiprocessing.pool
tkinter turtle ast aifc imghdr sndhdr cgi crypt getopt getpass graphlib nturl2path selectors sre_parse symtable
tabnanny"""


def items(text: str) -> list[str]:
    return [item.strip() for item in text.replace("\n", "").split("|")]


def stubs() -> list[str]:
    """Signature and first docstring paragraph of documented functions in the standard library."""
    found = []
    for module in MODULES.split():
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            continue
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                doc = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
                if 20 < len(doc) < 300:
                    found.append(f'def {node.name}({ast.unparse(node.args)}):\n    """{doc}\n    """\n')
    return sorted(set(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that receives train.jsonl and heldout.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)

    train = [("chat", f.format(t=t)) for t in items(TOPICS) for f in rng.sample(items(CHAT), 10)]
    train += [("code", f.format(t=t)) for t in items(TASKS) for f in items(CODE)]
    stdlib = stubs()
    rng.shuffle(stdlib)
    train += [("code", f"Complete the following Python function:\n\n```python\n{s}```") for s in stdlib[:900]]
    rng.shuffle(train)
    heldout = [("chat", f.format(t=t)) for t in items(HELDOUT_TOPICS) for f in rng.sample(items(CHAT), 2)]
    heldout += [("code", f.format(t=t)) for t in items(HELDOUT_TASKS) for f in rng.sample(items(CODE), 2)]
    rng.shuffle(heldout)

    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("heldout", heldout)):
        with open(args.out / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for number, (kind, prompt) in enumerate(rows):
                row = {"id": f"{name}-{number}", "kind": kind, "prompt": prompt}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(name, len(rows))


if __name__ == "__main__":
    main()
