// Command book builds the documentation as static pages: the chapters that
// docs/contents.md lists, in its order, with every link checked. What it writes
// needs no server and nothing from outside.
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	root := flag.String("root", ".", "the repository")
	out := flag.String("out", "out/book", "where the pages go")
	version := flag.String("version", "", "what the pages say they describe")
	flag.Parse()
	b, err := read(*root, *version)
	if err == nil {
		err = b.write(*out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "book:", err)
		os.Exit(1)
	}
	fmt.Printf("%d chapters: %s/index.html\n", len(b.chapters), *out)
}
