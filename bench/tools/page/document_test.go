package page

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func written(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

func textOf(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

func opening(name string) string {
	line, _ := Markers(name, "reproduce")
	return line
}

func closing(name string) string {
	_, line := Markers(name, "reproduce")
	return line
}

func TestOnlyWhatStandsBetweenMarkersChanges(t *testing.T) {
	before := "# Mine\n\nText.\n" + opening("open") + "old\n" + closing("open") + "\nMore | text.\n" + opening("closed") + closing("closed")
	path := written(t, "doc.md", before)
	p, err := openDocument(path, "reproduce")
	require.NoError(t, err)
	require.NoError(t, p.set("open", "", "\nnew\n\n"))
	require.NoError(t, p.save())
	require.Equal(t, "# Mine\n\nText.\n"+opening("open")+"new\n"+closing("open")+"\nMore | text.\n"+opening("closed")+closing("closed"),
		textOf(t, path))
}

func TestADocumentWithoutAPlaceIsRefused(t *testing.T) {
	for name, doc := range map[string]string{
		"nothing for it": "# Mine\n",
		"no end":         "# Mine\n" + opening("open") + "text\n",
		"another's end":  "# Mine\n" + opening("open") + "text\n" + closing("closed"),
	} {
		t.Run(name, func(t *testing.T) {
			p, err := openDocument(written(t, "doc.md", doc), "reproduce")
			require.NoError(t, err)
			require.ErrorContains(t, p.set("open", "", "new"), "doc.md has no place for the table")
		})
	}
}

func TestADocumentOfTablesAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "tables.md")
	for _, title := range []string{"Open", "Closed", "Open"} { // the last one is there already
		p, err := openDocument(path, "reproduce")
		require.NoError(t, err)
		require.NoError(t, p.set(title, title, title))
		require.NoError(t, p.save())
	}
	require.Equal(t, bareTitle+"\n## Open\n\n"+opening("Open")+"Open\n"+closing("Open")+"\n## Closed\n\n"+opening("Closed")+"Closed\n"+
		closing("Closed"), textOf(t, path))
}

func TestTableAlignsNumbersToTheRight(t *testing.T) {
	tab := Markdown{Head: []string{"load", "idle", "verdict"}, Text: 1}
	tab.Add("a", "1", "PASS")
	require.Equal(t, "| load | idle | verdict |\n|---|--:|---|\n| a | 1 | PASS |\n", tab.String())
}
