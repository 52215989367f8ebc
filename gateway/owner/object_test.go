package owner

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/validation"
)

// A role may name the Leases, so that docs/fleet.md promises their names.
func TestALeaseIsNamedAsItsGroup(t *testing.T) {
	page, err := os.ReadFile("../../docs/fleet.md")
	require.NoError(t, err)
	require.Equal(t, "evenkeel-group-main", groupObject("main"))
	require.Equal(t, "evenkeel-group-dp-0", groupObject("dp-0"))
	require.Contains(t, strings.Join(strings.Fields(string(page)), " "), "`dp_0` becomes `"+groupObject("dp_0")+"`")
	long := strings.Repeat("g", 300)
	for _, group := range []string{"main", "DP_0", "-0", "ä", "_", long, long + "h"} {
		require.Empty(t, validation.IsDNS1123Subdomain(groupObject(group)), group)
	}
	require.NotEqual(t, groupObject(long), groupObject(long+"h"))
}
