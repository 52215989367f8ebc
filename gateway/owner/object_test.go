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
	require.Equal(t, "evenkeel-group-main", groupLeaseName("main"))
	require.Equal(t, "evenkeel-group-dp-0", groupLeaseName("dp-0"))
	require.Contains(t, strings.Join(strings.Fields(string(page)), " "), "`dp_0` becomes `"+groupLeaseName("dp_0")+"`")
	long := strings.Repeat("g", 300)
	for _, group := range []string{"main", "DP_0", "-0", "ä", "_", long, long + "h"} {
		require.Empty(t, validation.IsDNS1123Subdomain(groupLeaseName(group)), group)
	}
	require.NotEqual(t, groupLeaseName(long), groupLeaseName(long+"h"))
}
