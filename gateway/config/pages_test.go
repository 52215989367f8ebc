package config

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/require"
)

// fields of receipts are named as keys are.
var fields = []string{"prefill.reason", "prefill.best"}

// Whatever page names a key by its path: configs/evenkeel.yaml has it, or the
// example of discovery.
func TestPagesNameKeysThatThereAre(t *testing.T) {
	paths := map[string]bool{}
	for _, file := range []string{"../../configs/evenkeel.yaml", "../../configs/discovery.yaml"} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var all map[string]any
		require.NoError(t, yaml.Unmarshal(text, &all))
		collect(paths, "", all)
	}
	pages, err := filepath.Glob("../../docs/*.md")
	require.NoError(t, err)
	named := regexp.MustCompile("`([a-z_]+(?:(?:\\[\\])?\\.[a-z0-9_]+)+)(?:: [^`]*)?`")
	for _, page := range append(pages, "../../README.md", "../../SECURITY.md") {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range named.FindAllStringSubmatch(string(text), -1) {
			path := strings.ReplaceAll(m[1], "[]", "")
			top, _, _ := strings.Cut(path, ".")
			if !paths[top] || slices.Contains([]string{".md", ".go", ".yaml", ".json"}, filepath.Ext(path)) {
				continue // a file, a field of a document
			}
			if !paths[path] && !slices.Contains(fields, path) {
				t.Errorf("%s names the key %s", page, m[1])
			}
		}
	}
}

// collect notes the paths of all keys; of a list, those of its elements.
func collect(paths map[string]bool, at string, value any) {
	switch v := value.(type) {
	case map[string]any:
		for key, inner := range v {
			path := strings.TrimPrefix(at+"."+key, ".")
			paths[path] = true
			collect(paths, path, inner)
		}
	case []any:
		for _, inner := range v {
			collect(paths, at, inner)
		}
	}
}
