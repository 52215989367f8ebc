package main

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const repository = "../../.."

func TestTheBookIsWhole(t *testing.T) {
	b, err := read(repository, "v0")
	require.NoError(t, err, "every chapter is there, every link leads somewhere")
	listed := map[string]bool{}
	for _, c := range b.chapters {
		listed[c.source] = true
	}
	pages, err := filepath.Glob(filepath.Join(repository, "docs", "*.md"))
	require.NoError(t, err)
	for _, p := range pages {
		source := "docs/" + filepath.Base(p)
		require.True(t, listed[source] || source == contentsFile, "%s is in no part of %s", source, contentsFile)
	}

	dir := t.TempDir()
	require.NoError(t, b.write(dir))
	for _, c := range b.chapters {
		text, err := os.ReadFile(filepath.Join(dir, c.Page))
		require.NoError(t, err)
		page := string(text)
		require.True(t, strings.Contains(page, "<h1") && strings.Contains(page, `aria-current="page"`), c.source)
		for _, outside := range []string{`src="http`, `href="http://fonts`, "@import"} {
			require.False(t, strings.Contains(page, outside), "%s: a page needs nothing from outside", c.source)
		}
	}
	for file := range b.files {
		require.FileExists(t, filepath.Join(dir, filepath.FromSlash(copyOf(file))))
	}
	require.NoError(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		require.NotEqual(t, ".go", filepath.Ext(path), "the pages lie in the module, and go build ./... would find a package")
		return err
	}))
	search, err := os.ReadFile(filepath.Join(dir, "search.js"))
	require.NoError(t, err)
	require.True(t, strings.Contains(string(search), "evenkeel_audit_drift"))
}

// small is a repository with these files.
func small(t *testing.T, files map[string]string) (root string) {
	t.Helper()
	root = t.TempDir()
	for name, text := range files {
		require.NoError(t, put(root, name, []byte(text)))
	}
	return root
}

func TestLinks(t *testing.T) {
	root := small(t, map[string]string{
		"docs/contents.md": "# Title\n\n## Part\n\n- [Start](../README.md)\n- [Other](other.md)\n",
		"README.md": "# Hello\n\n[a place](docs/other.md#what-it-is), [a file](configs/x.yaml), [a folder](configs), " +
			"[outside](https://example.org), [here](#hello)\n\n![a plot](docs/img/p.png)\n\n" +
			"<picture>\n  <source media=\"(prefers-color-scheme: dark)\" srcset=\"docs/img/dark.png\">\n  <img src=\"docs/img/light.png\" alt=\"a " +
			"page\">\n</picture>\n",
		"docs/other.md":  "# Other\n\n## What `it` is?\n\n## What it is\n\n[back](../README.md)\n\n| a | b |\n|---|---|\n| c_d | e |\n",
		"configs/x.yaml": "x: 1\n", "docs/img/p.png": "png", "docs/img/dark.png": "png", "docs/img/light.png": "png",
	})
	b, err := read(root, "")
	require.NoError(t, err)
	require.Equal(t, "Title", b.title)
	require.Equal(t, "index.html", b.chapters[0].Page)
	home := string(b.chapters[0].Body)
	for _, want := range []string{`href="other.html#what-it-is"`, `href="files/configs/x.yaml"`, `href="#"`, `href="https://example.org"`, `href="#hello"`, `src="files/docs/img/p.png"`,
		`<picture><source media="(prefers-color-scheme: dark)" srcset="files/docs/img/dark.png" /><img src="files/docs/img/light.png" alt="a page" /></picture>`} {
		require.Contains(t, home, want)
	}
	other := b.chapters[1]
	require.Equal(t, []string{"other", "what-it-is", "what-it-is-1"},
		[]string{other.Sections[0].ID, other.Sections[1].ID, other.Sections[2].ID}, "as code forges name them")
	require.Contains(t, string(other.Body), `href="index.html"`)
	require.Contains(t, other.Sections[2].Text, "c_d", "tables can be searched")
}

func TestWhatABookCannotBe(t *testing.T) {
	for _, tc := range []struct{ name, contents, page, says string }{
		{"a chapter that is not there", "- [A](a.md)\n- [B](b.md)\n", "# A\n", "b.md"},
		{"no chapters", "# Title\n", "# A\n", "lists no chapter"},
		{"two chapters of one page", "- [A](a.md)\n- [A again](../a.md)\n", "# A\n", "would both be a.html"},
		{"a link to nothing", "- [A](a.md)\n", "# A\n\n[x](gone.md)\n", "docs/a.md: a link to gone.md, which is not in the repository"},
		{"a link out of the repository", "- [A](a.md)\n", "# A\n\n[x](../../etc/passwd)\n", "not in the repository"},
		{"a page with HTML of its own", "- [A](a.md)\n", "# A\n\nsome <b>bold</b>\n", "HTML in the text, which pages leave out: <b>"},
		{"a picture that is not there", "- [A](a.md)\n", "# A\n\n<picture>\n<source media=\"(prefers-color-scheme: dark)\" srcset=\"gone.png\">\n<img src=\"a.md\" alt=\"\">\n</picture>\n", "a link to gone.png"},
		{"a link to a heading that is not there", "- [A](a.md)\n", "# A\n\n[x](#b)\n", "a link to docs/a.md#b"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := read(small(t, map[string]string{"docs/contents.md": tc.contents, "docs/a.md": tc.page, "a.md": "# A\n"}), "")
			require.ErrorContains(t, err, tc.says)
		})
	}
}

func TestAnOpenAPIDocumentIsAChapter(t *testing.T) {
	page, err := describe([]byte(`
openapi: 3.0.3
info: {title: API, description: What it takes., version: "1"}
tags: [{name: For clients, description: The port.}]
paths:
  /v1/models:
    get:
      tags: [For clients]
      summary: The models.
      parameters: [{name: n, in: query, description: "how | many", schema: {type: integer}}]
      responses:
        "200": {description: All of them., headers: {X-Count: {description: how many, schema: {type: integer}}}, content: {application/json: {schema: {$ref: "#/components/schemas/Models"}}}}
components:
  schemas:
    Models: {type: object, description: A list., required: [data], properties: {data: {type: array, items: {type: string}, description: names}, more: {nullable: true, allOf: [{$ref: "#/components/schemas/Models"}], description: the rest}}}
`))
	require.NoError(t, err)
	for _, want := range []string{"# API", "## For clients", "### GET /v1/models", "| `n` | query | how \\| many |",
		"| 200 | All of them. `application/json`: [Models](#models) |", "### Models", "| `data` | list of string, always there | names |",
		"| `X-Count` | how many |", "| `more` | [Models](#models), or null | the rest |"} {
		require.Contains(t, string(page), want)
	}
	_, err = describe([]byte("openapi: 3.0.3\npaths: {}\n"))
	require.Error(t, err)
	require.False(t, strings.Contains(err.Error(), "\n\n"))
}

// On a telephone no page of the book is wider than the screen: what is wide
// scrolls by itself.
func TestPagesFitANarrowScreen(t *testing.T) {
	if testing.Short() {
		t.Skip("a browser takes seconds")
	}
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("no Chromium here, so the pages are not tried in one: apt-get install chromium")
	}
	b, err := read(repository, "0.1.0-dev.20261127165220.g156e9b6f4218-dirty") // as long as `make book` makes them
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t, b.write(dir))
	opts := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(path), chromedp.NoSandbox)
	allocator, cancel := chromedp.NewExecAllocator(t.Context(), opts...)
	defer cancel()
	tab, cancelTab := chromedp.NewContext(allocator)
	defer cancelTab()
	require.NoError(t, chromedp.Do(tab))
	require.NoError(t, chromedp.Do(tab, chromedp.EmulateViewport(390, 844)))
	for _, c := range b.chapters {
		require.NoError(t, chromedp.Do(tab, chromedp.Navigate("file://"+filepath.Join(dir, c.Page))))
		wide, err := chromedp.Run(tab, chromedp.Evaluate[string](`(() => {
			if (document.documentElement.scrollWidth <= innerWidth) return '';
			const over = [...document.querySelectorAll('main *, header *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('pre, .wide'));
			return (document.documentElement.scrollWidth - innerWidth) + ' px: ' + over.slice(0, 5).map((e) => e.tagName + ' ' + e.textContent.slice(0, 60)).join(' | ');
		})()`))
		require.NoError(t, err)
		assert.Empty(t, wide, c.source)
	}
}
