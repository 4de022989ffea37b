package main

import "virtkit/e2e/gitsrv"

// project is the path of the demo's project.
const project = "demo/wordcount"

const wordcountC = `#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Counts how often each word occurs on stdin, most frequent first. */
struct entry { char *word; int count; };

static int by_count(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;
	if (x->count != y->count)
		return y->count - x->count;
	return strcmp(x->word, y->word);
}

int main(void)
{
	struct entry *e = NULL;
	size_t n = 0, len = 0;
	char word[256];
	int c;

	do {
		c = getchar();
		if (c != EOF && isalpha(c)) {
			if (len < sizeof word - 1)
				word[len++] = tolower(c);
			continue;
		}
		if (len == 0)
			continue;
		word[len] = 0;
		len = 0;
		size_t i = 0;
		while (i < n && strcmp(e[i].word, word) != 0)
			i++;
		if (i == n) {
			e = realloc(e, ++n * sizeof *e);
			e[i].word = strdup(word);
			e[i].count = 0;
		}
		e[i].count@STEP@;
	} while (c != EOF);
	qsort(e, n, sizeof *e, by_count);
	for (size_t i = 0; i < n; i++)
		printf("%4d %s\n", e[i].count, e[i].word);
	return 0;
}
`

const makefile = `CC ?= cc

wordcount: wordcount.c
	$(CC) -Wall -o $@ $<

check: wordcount
	sh ./test.sh

clean:
	rm -f wordcount
`

const testScript = `#!/bin/sh
# Each case: input, expected first line.
failed=0 n=0
check() {
	n=$((n + 1))
	got=$(printf '%s' "$1" | ./wordcount | head -n 1)
	if [ "$got" = "$2" ]; then
		echo "ok $n - $1"
	else
		echo "not ok $n - $1: expected '$2', got '$got'"
		failed=$((failed + 1))
	fi
}
check "one" "   1 one"
check "to be or not to be" "   2 be"
check "The the THE" "   3 the"
check "a-b-a, a." "   3 a"
echo "1..$n"
[ $failed -eq 0 ]
`

// makeProject makes the repository and returns its commit. A bug counts each
// word twice.
func makeProject(root string, bug bool) (string, error) {
	r, err := gitsrv.InitBare(root, project+".git")
	if err != nil {
		return "", err
	}
	step := "++"
	if bug {
		step = " += 2"
	}
	sha, err := r.Commit(gitsrv.Commit{Message: "count the words", Date: "2026-01-01T12:00:00Z", Files: []gitsrv.File{
		{Path: "wordcount.c", Mode: "100644", Data: replace(wordcountC, "@STEP@", step)},
		{Path: "Makefile", Mode: "100644", Data: makefile},
		{Path: "test.sh", Mode: "100755", Data: testScript},
		{Path: ".gitlab-ci.yml", Mode: "100644", Data: ciYAML},
	}})
	if err != nil {
		return "", err
	}
	return sha, r.Ref("refs/heads/main", sha)
}
