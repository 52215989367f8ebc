package main

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// contentsFile lists the chapters: parts as headings, chapters as links.
const contentsFile = "docs/contents.md"

// A book is every chapter, read and rendered.
type book struct {
	root     string
	title    string
	version  string
	chapters []*chapter
	files    map[string]bool // of the repository, that pages link to, by slashed path
}

// A chapter is one page.
type chapter struct {
	Part   string // of the book; empty: that of the chapter before
	Name   string // in the contents
	Page   string // its file
	source string // in the repository, slashed
	*rendered
}

var (
	partLine    = regexp.MustCompile(`^## (.+)$`)
	chapterLine = regexp.MustCompile(`^- \[([^\]]+)\]\(([^)#]+)\)`)
)

// read reads the contents and then every chapter.
func read(root, version string) (*book, error) {
	text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(contentsFile)))
	if err != nil {
		return nil, err
	}
	b := &book{root: root, version: version, files: map[string]bool{}}
	part := ""
	for n, line := range strings.Split(string(text), "\n") {
		switch {
		case strings.HasPrefix(line, "# "):
			b.title = line[2:]
		case partLine.MatchString(line):
			part = partLine.FindStringSubmatch(line)[1]
		case chapterLine.MatchString(line):
			m := chapterLine.FindStringSubmatch(line)
			c := &chapter{Part: part, Name: m[1], source: path.Join(path.Dir(contentsFile), m[2])}
			c.Page = pageOf(c.source)
			if other := b.page(c.Page); other != nil {
				return nil, fmt.Errorf("%s:%d: %s and %s would both be %s", contentsFile, n+1, other.source, c.source, c.Page)
			}
			b.chapters = append(b.chapters, c)
			part = ""
		}
	}
	if len(b.chapters) == 0 {
		return nil, fmt.Errorf("%s lists no chapter", contentsFile)
	}
	b.chapters[0].Page = "index.html"
	for _, c := range b.chapters {
		source, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(c.source)))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", contentsFile, err)
		}
		if strings.HasSuffix(c.source, ".yaml") {
			if source, err = describe(source); err != nil {
				return nil, fmt.Errorf("%s: %w", c.source, err)
			}
		}
		if c.rendered, err = b.render(c, source); err != nil {
			return nil, fmt.Errorf("%s: %w", c.source, err)
		}
	}
	return b, b.check()
}

// pageOf names the page of a source file.
func pageOf(source string) string {
	base := path.Base(source)
	return strings.ToLower(strings.TrimSuffix(base, path.Ext(base))) + ".html"
}

func (b *book) page(name string) *chapter {
	for _, c := range b.chapters {
		if c.Page == name {
			return c
		}
	}
	return nil
}

// check holds every link against what it points at.
func (b *book) check() error {
	var errs []error
	for _, c := range b.chapters {
		for _, l := range c.links {
			if to := b.page(l.page); to != nil && l.anchor != "" && !to.has(l.anchor) {
				errs = append(errs, fmt.Errorf("%s: a link to %s#%s, and no heading there makes that anchor", c.source, to.source, l.anchor))
			}
		}
	}
	return errors.Join(errs...)
}
