package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFindTellsServerAndNamespace(t *testing.T) {
	kubeconfig := func(context string) string {
		file := filepath.Join(t.TempDir(), "kubeconfig")
		require.NoError(t, os.WriteFile(file, fmt.Appendf(nil,
			`{"clusters":[{"name":"c","cluster":{"server":"http://api:8001"}}],"contexts":[{"name":"c","context":{"cluster":"c"%s}}],"current-context":"c"}`, context), 0o600))
		return file
	}
	for _, row := range []struct{ name, context, asked, want string }{
		{"the one that is named", `,"namespace":"theirs"`, "ours", "ours"},
		{"else that of the kubeconfig", `,"namespace":"theirs"`, "", "theirs"},
		{"which may be Kubernetes' own default", "", "", "default"},
	} {
		cfg, namespace, err := Find(kubeconfig(row.context), row.asked)
		require.NoError(t, err, row.name)
		require.Equal(t, row.want, namespace, row.name)
		require.Equal(t, "http://api:8001", cfg.Host, row.name)
	}
}

func TestFindSaysWhatIsMissing(t *testing.T) {
	_, _, err := Find("", "ek")
	require.ErrorContains(t, err, "a kubeconfig is needed")
	_, _, err = Find("/no/such/kubeconfig", "ek")
	require.ErrorContains(t, err, "kubeconfig /no/such/kubeconfig: ")
	require.ErrorContains(t, err, "no such file")
	require.NotContains(t, err.Error(), "is needed", "there is one in the config")
	broken := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(broken, []byte("{"), 0o600))
	_, _, err = Find(broken, "ek")
	require.Error(t, err)
}

func TestAPodReadsItsNamespace(t *testing.T) {
	file := filepath.Join(t.TempDir(), "namespace")
	_, err := readNamespace(file)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.WriteFile(file, []byte("\n"), 0o600))
	_, err = readNamespace(file)
	require.ErrorContains(t, err, "is empty")
	require.NoError(t, os.WriteFile(file, []byte("serving\n"), 0o600))
	namespace, err := readNamespace(file)
	require.NoError(t, err)
	require.Equal(t, "serving", namespace)
}
