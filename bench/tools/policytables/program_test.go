package policytables

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/tools/page"
)

var program = Program[*Book]{
	Name: "these", Seeds: 3, Traces: ReadTraces, Book: func(b *Book) *Book { return b },
	Blocks: []page.Block[*Book]{
		{Name: "open", Title: "Open", Tables: func(*Book) string { return "of open" }},
		{Name: "claims", Title: "Claims", Tables: func(*Book) string { return "of claims" }},
	},
}

func TestWhereTablesGo(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		want Options
	}{
		{"our traces fill our page", nil, Options{Out: "docs/results/these.md"}},
		{"a quick run does not", []string{"--quick"}, Options{Out: "out/these.md", Quick: true, Files: []string{}}},
		{"nor do a user's traces", []string{"a.csv", "b.jsonl"}, Options{Out: "out/these.md", Files: []string{"a.csv", "b.jsonl"}}},
		{"unless that is said", []string{"--quick", "--out", "x.md", "a.csv"}, Options{Out: "x.md", Quick: true, Files: []string{"a.csv"}}},
		{"some tables", []string{"--only", "open,claims"}, Options{Out: "docs/results/these.md", Only: []string{"open", "claims"}, Files: []string{}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := program.parse(c.args)
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
	_, err := program.parse([]string{"--only", "opened"})
	require.ErrorContains(t, err, "--only opened: there are open, claims")
}

func TestABlockBeginsWithTheCommandThatMakesItAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tables.md")
	for _, only := range [][]string{{"claims"}, {"open"}} { // the second run leaves the first one's table as it is
		b := &Book{Options: Options{Out: path, Quick: only[0] == "open", Only: only, Files: []string{"a.csv"}},
			Runs: page.Runs{Progress: io.Discard}}
		require.NoError(t, program.Fill(b))
	}
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Contains(t, string(text), "<!-- claims: written by `make claim NAME=these` -->\n`go run ./bench/claims/these --only claims "+
		"a.csv`\n\nof claims\n<!-- end of claims -->\n")
	require.Contains(t, string(text), "<!-- open: written by `make claim NAME=these` -->\n`go run ./bench/claims/these --only open --quick "+
		"a.csv`\n\nof open\n<!-- end of open -->\n")
}

func TestAProgramWithoutTraces(t *testing.T) {
	plain := program
	plain.Traces = nil
	_, err := plain.parse([]string{"a.csv"})
	require.ErrorContains(t, err, `"a.csv": the program takes no files`)
	o, err := plain.parse([]string{"--out", filepath.Join(t.TempDir(), "tables.md"), "--only", "open"})
	require.NoError(t, err)
	require.NoError(t, plain.run(t.Context(), o))
	text, err := os.ReadFile(o.Out)
	require.NoError(t, err)
	require.Contains(t, string(text), "\n<!-- open: written by `make claim NAME=these` -->\nof open\n", "the block says its own command")
}
