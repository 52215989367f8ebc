package main

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTheManualPageHasAllThatHelpHas renders the page where man is installed.
func TestTheManualPageHasAllThatHelpHas(t *testing.T) {
	status, page, errs := line("man")
	require.Zero(t, status, errs)
	for _, part := range []string{".SH NAME", `.SS "serve [flags]"`, `\-\-config`, `.SS "keys new`, "lets a shell complete"} {
		require.Contains(t, page, part)
	}
	require.NotContains(t, page, "Words of the command line", "a command that is hidden")
	for l := range strings.Lines(page) {
		if strings.HasPrefix(l, ".") {
			require.Regexp(t, `^\.(TH|SH|SS|TP|PP|B|I|nf|fi)\b`, l, "text is taken for a request of the formatter")
		}
	}
	man, err := exec.LookPath("groff")
	if err != nil {
		t.Skip("no groff here")
	}
	render := exec.Command(man, "-man", "-Tutf8", "-ww", "-z")
	render.Stdin = strings.NewReader(page)
	out, err := render.CombinedOutput()
	require.NoError(t, err)
	require.Empty(t, string(out), "the formatter complains")
}
