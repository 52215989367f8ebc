package admin

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// errorRow is a code, its status and whole sentences: what happened, and what to do where the
// heading of the table does not say it.
var errorRow = regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| (\\d{3}) \\| [A-Z].*\\. \\|$")

// docs/errors.md says for every code what a client should do, and has no other code.
func TestTheErrorsPageHasEveryCode(t *testing.T) {
	text, err := os.ReadFile("../../docs/errors.md")
	require.NoError(t, err)
	of := func(section string) (all []string) {
		for _, m := range errorRow.FindAllStringSubmatch(section, -1) {
			all = append(all, m[2]+" "+m[1])
		}
		if strings.Contains(section, "`client_closed` (499)") { // in no answer, so in no table
			all = append(all, "499 client_closed")
		}
		return all
	}
	forClients, forOperators, ok := strings.Cut(string(text), "\n## Errors of operators' calls\n")
	require.True(t, ok)
	doc := documented(t)
	require.ElementsMatch(t, codes(doc, clients), of(forClients), "TestOpenAPIHasEveryErrorCode holds the left list against the code")
	require.ElementsMatch(t, codes(doc, operators), of(forOperators))
}
